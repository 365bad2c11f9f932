"""From a model's raw config.json to its table of MoE layers.

The raw JSON is read rather than a config class: class aliases differ between releases of transformers,
and a dense or unknown model must be refused before anything heavy is imported.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from smoe_profiles.errors import ImpossibleError, InputError
from smoe_profiles.families.table import FAMILIES, Family

Config = dict[str, Any]


@dataclass(frozen=True)
class MoeLayer:
    """One MoE layer: decoder layer `id`, `num_experts` routed experts of which a token uses `top_k`.

    num_groups > 1 means a group-limited router whose groups a renumbering must keep whole (design 4.3);
    a group rule that cannot change the choice counts as none.
    """

    id: int
    num_experts: int
    top_k: int
    num_groups: int
    rule: str


@dataclass(frozen=True)
class ModelSpec:
    """What the tools need to know of a model, all of it from config.json."""

    family: Family
    layers: tuple[MoeLayer, ...]
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int

    def layer_table(self) -> list[dict[str, Any]]:
        """The MoE layers as plain dictionaries, for manifests."""
        return [asdict(layer) for layer in self.layers]


def _all_layers(_config: Config, num_layers: int, _where: str) -> list[int]:
    return list(range(num_layers))


def _first_k_dense(config: Config, num_layers: int, where: str) -> list[int]:
    first = _whole(config, "first_k_dense_replace", 0, where, least=0)
    every = _whole(config, "moe_layer_freq", 1, where)
    return [layer for layer in range(first, num_layers) if layer % every == 0]


def _sparse_step(config: Config, num_layers: int, where: str) -> list[int]:
    step = _whole(config, "decoder_sparse_step", 1, where)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise InputError(f"{where} has mlp_only_layers = {dense!r}; a list of layer numbers was expected.")
    return [layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0]


def _whole(config: Config, key: str, default: int, where: str, least: int = 1) -> int:
    """A whole number of the config, `default` where the key is absent. Raises InputError for anything else."""
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{where} has {key} = {value!r}; a whole number of at least {least} was expected.")
    return value


LAYER_RULES: dict[str, Callable[[Config, int, str], list[int]]] = {
    "all": _all_layers,
    "first_k_dense": _first_k_dense,
    "sparse_step": _sparse_step,
}


def read_spec(config: Config, where: str) -> ModelSpec:
    """The layer table of a model from its raw config.

    where: the file, for messages.
    Raises ImpossibleError for a dense or unknown model, InputError for a config that contradicts itself.
    """
    model_type = config.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise ImpossibleError(
            f"model_type {model_type!r} ({where}) is dense or not a family smoe knows. Known: {known}. "
            "A new family is one row in smoe_profiles/families/table.py."
        )
    experts_key = next((key for key in family.experts_keys if config.get(key)), family.experts_keys[0])
    if not config.get(experts_key):
        raise ImpossibleError(f"{where} has {experts_key} = {config.get(experts_key)!r}: a dense model has no experts.")
    num_experts, top_k, num_layers, vocab_size, hidden_size = (
        _whole(config, key, 0, where)
        for key in (experts_key, family.top_k_key, "num_hidden_layers", "vocab_size", "hidden_size")
    )
    if top_k > num_experts:
        raise InputError(f"{where}: {family.top_k_key} = {top_k} is more than {experts_key} = {num_experts}.")
    layer_ids = LAYER_RULES[family.layer_rule](config, num_layers, where)
    if not layer_ids:
        raise ImpossibleError(f"{where}: none of the {num_layers} layers is an MoE layer; there is nothing to place.")
    num_groups = _effective_groups(config, family, num_experts, top_k, where)
    rule = family.rule if num_groups == 1 else f"{family.rule}, {config[family.group_keys[1]]} of {num_groups} groups"
    return ModelSpec(
        family=family,
        layers=tuple(MoeLayer(layer, num_experts, top_k, num_groups, rule) for layer in layer_ids),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
    )


def _effective_groups(config: Config, family: Family, num_experts: int, top_k: int, where: str) -> int:
    """Groups that a renumbering has to respect, or 1 where the rule commutes with any permutation.

    DeepSeek-V2 scores a group by its best expert, so with K <= topk_group the K best experts always lie
    in the chosen groups and the rule is vacuous.
    """
    if not family.group_keys or config.get("topk_method", "greedy") == "greedy":
        return 1
    groups, chosen = (_whole({key: config.get(key) or 1}, key, 1, where) for key in family.group_keys)
    if groups <= 1 or chosen >= groups or top_k <= chosen:
        return 1
    if num_experts % groups:
        raise InputError(f"{where}: {num_experts} experts do not divide into {family.group_keys[0]} = {groups} groups.")
    return groups
