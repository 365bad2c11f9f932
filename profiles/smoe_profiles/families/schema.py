"""What a row of the table of model families says: config keys, names on disk, and where a choice can be read."""

from dataclasses import dataclass
from enum import StrEnum


class Point(StrEnum):
    """Where a layer's choice is read: ids and weights on their way into the experts, or logits out of the router."""

    EXPERTS_INPUT = "experts-input"
    ROUTER_OUTPUT = "router-output"


@dataclass(frozen=True)
class Disk:
    """The tensor names of one MoE layer in the files.

    block: the MoE block, with `{layer}`; other names are relative to it unless they hold `{layer}` themselves.
    router: tensors with an expert axis that are no expert's own (weight first; biases follow): the first axis longer
    than 1 has a row an expert, then those of zero experts and others that are never chosen.
    parts: an expert's projections, (gate,) up, down, under `experts.<n>.`; empty where experts are fused.
    shared: sub-modules of the block that every token uses; copied as they are.
    fused: where tensors of all experts in one lie, the expert axis first, whatever the order of the others.
    row_blocks: of fused tensors, that they are 2-D, an expert a block of rows.
    tables: integer tensors whose values are expert numbers.
    apart: further stacks of experts beside the block, with routers of their own; left as they are.
    """

    block: str
    router: tuple[str, ...]
    parts: tuple[str, ...]
    shared: tuple[str, ...] = ()
    embedding: str = "model.embed_tokens.weight"
    fused: tuple[str, ...] = ("experts.",)
    row_blocks: bool = False
    tables: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()

    def router_names(self, layer: int) -> list[str]:
        """Full names of a layer's router tensors, the weight first."""
        return [(name if "{layer}" in name else f"{self.block}.{name}").format(layer=layer) for name in self.router]


@dataclass(frozen=True)
class Family:
    """One model type's MoE layout. Config keys may be dotted; of several, the first that the config holds counts.

    config.json:
    nested: the key under which the text model's config lies.
    experts_keys, top_k_keys, hidden_key: keys of E, K and H; E and K may be lists with one number a layer.
    layers_keys: keys of the number of decoder layers, or of a list with one entry a layer.
    layer_rule: which decoder layers are MoE layers, a key of `config.LAYER_RULES`.
    dense_keys, dense_first: keys of the number of leading dense layers, and the class's own number where none is set.
    rule: how the router scores experts, as printed to the user.
    group_keys, group_defaults: keys of a group-limited router (groups, groups chosen) and the class's own numbers.
    group_aliases: other keys of the number of groups. group_method_key: set to "greedy", it switches groups off.
    group_score: how a group is scored, `max` of its experts or `sum2`, the sum of its two best.
    zero_key, zero_experts: key or fixed number of choices behind the experts that compute nothing.
    router_tail_key: key of further router rows that are never chosen. router_width_key: the router's input width, if
    not H. hash_key, hash_first: key of the number of leading layers that look experts up by token id.

    disk: the published names first, then those transformers writes where they differ.

    In transformers:
    layers: the decoder list under the base model. memory_block: the MoE block in a decoder layer.
    watched, point: the module in the block whose call shows the choice, and on which side of it to look.
    logits_at, weigh: of a router's output, which element holds the logits (if there are several), and how the chosen
    ones become weights.
    left_padding: False where generating over padding on the left changes what the tokens attend.
    zero_by_weight: the one zero expert arrives as id 0 with weight 0.
    memory_router: the router tensors' names in the block, where they are not those on disk.
    before_router: what the layer's input runs through before the router's weight, of modules in a decoder layer.
    hidden_at: which tensor to take of such a module's several.
    router_bias: a bias of the logits themselves. router_scale: a factor [H] of the router's input, besides H ** -0.5.
    """

    model_type: str
    disk: tuple[Disk, ...]
    experts_keys: tuple[str, ...]
    rule: str
    layer_rule: str = "all"
    nested: str = ""
    top_k_keys: tuple[str, ...] = ("num_experts_per_tok",)
    hidden_key: str = "hidden_size"
    layers_keys: tuple[str, ...] = ("num_hidden_layers",)
    dense_keys: tuple[str, ...] = ("first_k_dense_replace",)
    dense_first: int = 0
    group_keys: tuple[str, ...] = ()
    group_defaults: tuple[int, int] = (1, 1)
    group_aliases: tuple[str, ...] = ()
    group_method_key: str = ""
    group_score: str = "sum2"
    zero_key: str = ""
    zero_experts: int = 0
    router_tail_key: str = ""
    router_width_key: str = ""
    hash_key: str = ""
    hash_first: int = 0
    layers: str = "layers"
    memory_block: str = "mlp"
    watched: str = "experts"
    point: Point = Point.EXPERTS_INPUT
    logits_at: int = 0
    weigh: str = "softmax"
    left_padding: bool = True
    zero_by_weight: bool = False
    memory_router: tuple[str, ...] = ()
    before_router: tuple[str, ...] = ("post_attention_layernorm",)
    hidden_at: int = -1
    router_bias: str = ""
    router_scale: str = ""

    def in_memory(self, name: str) -> str:
        """A name in the block as a path from the decoder layer."""
        return f"{self.memory_block}.{name}" if self.memory_block else name

    def router_in_memory(self) -> list[str]:
        """The router tensors as paths from the decoder layer, in the order of `Disk.router`."""
        return [self.in_memory(name) for name in self.memory_router or self.disk[0].router]
