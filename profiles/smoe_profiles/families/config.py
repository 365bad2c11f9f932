"""From a model's raw config.json to its table of MoE layers.

The raw JSON is read rather than a config class: class aliases differ between releases of transformers,
and a dense or unknown model must be refused before anything heavy is imported.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from smoe_profiles.errors import ImpossibleError, InputError
from smoe_profiles.families.schema import Family
from smoe_profiles.families.table import FAMILIES, REFUSED

Config = dict[str, Any]

ADD_A_FAMILY = "A new family is one row in smoe_profiles/families/table.py."
MOST_LAYERS = 10_000
TOKEN_HASH = "token hash"
"""The rule of a layer that looks its experts up by token id."""


@dataclass(frozen=True)
class MoeLayer:
    """One MoE layer: decoder layer `id`, `num_experts` routed experts of which a token uses `top_k`.

    num_groups > 1 means a group-limited router whose groups a renumbering must keep whole;
    a group rule that cannot change the choice counts as none.
    num_zero_experts: choices that compute nothing; their ids follow those of the experts.
    """

    id: int
    num_experts: int
    top_k: int
    num_groups: int
    rule: str
    num_zero_experts: int = 0


@dataclass(frozen=True)
class ModelSpec:
    """What the tools need to know of a model, all of it from config.json.

    router_tail: rows of a router's weight behind those of experts and zero experts, never chosen.
    router_width: columns of a router's weight. expert_width: inner width of one expert, 0 where the config has none.
    """

    family: Family
    layers: tuple[MoeLayer, ...]
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    router_tail: int
    router_width: int
    expert_width: int = 0

    def layer_table(self) -> list[dict[str, Any]]:
        """The MoE layers as plain dictionaries, for manifests; zero experts are named only where there are any."""
        tables = [asdict(layer) for layer in self.layers]
        return [{key: value for key, value in row.items() if value or key != "num_zero_experts"} for row in tables]

    def router_shape(self, layer: MoeLayer) -> tuple[int, int]:
        """Rows and columns of a layer's router weight."""
        return layer.num_experts + layer.num_zero_experts + self.router_tail, self.router_width


@dataclass(frozen=True)
class _Reader:
    """Keys of one model's config, checked as they are read; where: the file, for messages."""

    config: Config
    family: Family
    where: str

    def get(self, key: str) -> Any:
        """The value under a dotted key, or None."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def first(self, keys: tuple[str, ...]) -> str:
        """The first key that is set, or the first of all: the published name, for messages."""
        return next((key for key in keys if self.get(key)), keys[0])

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number, `default` where the key is absent. Raises InputError for anything else."""
        absent = default is not None and self.get(key) is None and key not in self.config
        return self.check(key, default if absent else self.get(key), least)

    def check(self, key: str, value: Any, least: int = 1) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InputError(f"{self.where} has {key} = {value!r}; a whole number of at least {least} was expected.")
        return value

    def listed(self, key: str, length: int | None) -> list[Any] | None:
        """A list (of `length` entries), or None where the key is absent. Raises InputError for anything else."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or (length is not None and len(value) != length):
            wanted = "a list of layer numbers" if length is None else f"a list of {length} entries, one a layer,"
            raise InputError(f"{self.where} has {key} = {value!r}; {wanted} was expected.")
        return value

    def per_layer(self, keys: tuple[str, ...], num_layers: int) -> list[int]:
        """A number for each decoder layer, from one number or a list of them."""
        key = self.first(keys)
        value = self.get(key)
        if isinstance(value, list):
            return [self.check(key, entry) for entry in self.listed(key, num_layers) or []]
        return [self.whole(key)] * num_layers

    def num_layers(self) -> int:
        """Decoder layers, from their number or from a list or pattern with one entry each."""
        key = self.first(self.family.layers_keys)
        value = self.get(key)
        layers = self.check(key, len(value) if isinstance(value, list | str) else value)
        if layers > MOST_LAYERS:
            raise InputError(f"{self.where} has {key} = {layers}; at most {MOST_LAYERS} layers are possible.")
        return layers


def _all_layers(_read: _Reader, num_layers: int) -> list[int]:
    return list(range(num_layers))


def _first_dense(read: _Reader, num_layers: int) -> list[int]:
    """Kinds listed layer by layer, or some dense layers first and then every n-th one MoE."""
    kinds = read.listed("mlp_layer_types", num_layers)
    if kinds is not None:
        return [layer for layer, kind in enumerate(kinds) if kind != "dense"]
    if isinstance(read.get("moe_layer_freq"), list):
        return [layer for layer, moe in enumerate(read.listed("moe_layer_freq", num_layers) or []) if moe]
    first = read.whole(read.first(read.family.dense_keys), read.family.dense_first, least=0)
    every = read.whole("moe_layer_freq", 1)
    return [layer for layer in range(first, num_layers) if layer % every == 0]


def _enumerated(read: _Reader, num_layers: int) -> list[int]:
    """Kinds listed layer by layer, or the numbers of the MoE layers: a list, or a text with commas between them."""
    numbers = read.get("moe_layers_enum")
    if numbers is None or read.get("mlp_layer_types") is not None:
        return _first_dense(read, num_layers)
    if isinstance(numbers, str):
        numbers = [int(part) if part.strip().isdigit() else part for part in numbers.split(",") if part.strip()]
    if not isinstance(numbers, list):
        raise InputError(f"{read.where} has moe_layers_enum = {numbers!r}; a list of layer numbers was expected.")
    return sorted({read.check("moe_layers_enum", layer, least=0) for layer in numbers} & set(range(num_layers)))


def _sparse_step(read: _Reader, num_layers: int) -> list[int]:
    step = read.whole("decoder_sparse_step", 1)
    dense = read.listed("mlp_only_layers", None)
    dense = list(range(read.family.dense_first)) if dense is None else dense
    for layer in dense:
        read.check("mlp_only_layers", layer, least=0)
    return [layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0]


def _interleaved(read: _Reader, num_layers: int) -> list[int]:
    listed = read.listed("moe_layers", None)
    if listed is None:
        step = read.whole("interleave_moe_layer_step", 1)
        return list(range(step - 1, num_layers, step))
    return sorted({read.check("moe_layers", layer, least=0) for layer in listed} & set(range(num_layers)))


def _interval(read: _Reader, num_layers: int) -> list[int]:
    start = read.whole("moe_layer_start_index", read.family.dense_first, least=0)
    last = read.whole("moe_layer_end_index", -1, least=-1)
    step = read.whole("moe_layer_interval", 1)
    end = num_layers if last == -1 else min(last + 1, num_layers)
    return [layer for layer in range(start, end) if (layer + 1) % step == 0]


def _period(read: _Reader, num_layers: int) -> list[int]:
    period, offset = read.whole("expert_layer_period", 2), read.whole("expert_layer_offset", 1, least=0)
    return [layer for layer in range(num_layers) if layer % period == offset]


def _block_types(read: _Reader, num_layers: int) -> list[int]:
    """One mixer a layer, named in a list or by a letter; E and `moe` are experts."""
    kinds = read.get(read.first(read.family.layers_keys))
    return [layer for layer in range(num_layers) if kinds[layer] in ("moe", "E")]


LAYER_RULES: dict[str, Callable[[_Reader, int], list[int]]] = {
    "all": _all_layers,
    "first_dense": _first_dense,
    "enumerated": _enumerated,
    "sparse_step": _sparse_step,
    "interleaved": _interleaved,
    "interval": _interval,
    "period": _period,
    "block_types": _block_types,
}


def read_spec(config: Config, where: str) -> ModelSpec:
    """The layer table of a model from its raw config.

    where: the file, for messages.
    Raises ImpossibleError for a dense or unknown model, InputError for a config that contradicts itself.
    """
    family = _family(config, where)
    text = config.get(family.nested) if family.nested else config
    if not isinstance(text, dict):
        raise InputError(f"{where} has {family.nested} = {text!r}; the text model's settings were expected.")
    read = _Reader(text, family, where)
    experts_key = read.first(family.experts_keys)
    if not read.get(experts_key):
        raise ImpossibleError(
            f"{where} has {experts_key} = {read.get(experts_key)!r}: a dense model has no experts. {ADD_A_FAMILY}"
        )
    num_layers = read.num_layers()
    num_experts, top_k = (read.per_layer(keys, num_layers) for keys in (family.experts_keys, family.top_k_keys))
    vocab_size, hidden_size = read.whole("vocab_size"), read.whole(family.hidden_key)
    layer_ids = LAYER_RULES[family.layer_rule](read, num_layers)
    if not layer_ids:
        raise ImpossibleError(f"{where}: none of the {num_layers} layers is an MoE layer; there is nothing to place.")
    return ModelSpec(
        family=family,
        layers=tuple(_layer(read, layer, num_experts[layer], top_k[layer]) for layer in layer_ids),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        router_tail=read.whole(family.router_tail_key, least=0) if family.router_tail_key else 0,
        router_width=read.whole(family.router_width_key) if family.router_width_key else hidden_size,
        expert_width=_expert_width(text),
    )


WIDTH_KEYS = ("moe_intermediate_size", "expert_intermediate_size", "ffn_hidden_size", "intermediate_size")
"""Where a config names the width of one expert, the most particular first."""


def _expert_width(text: Config) -> int:
    """The first of WIDTH_KEYS in the text model's settings or in a part of them."""
    places = [text, *(value for value in text.values() if isinstance(value, dict))]
    found = (place.get(key) for key in WIDTH_KEYS for place in places)
    return next((width for width in found if type(width) is int and width > 0), 0)


def _family(config: Config, where: str) -> Family:
    model_type = str(config.get("model_type"))
    if model_type in REFUSED:
        raise ImpossibleError(f"model_type {model_type!r} ({where}) cannot be profiled: {REFUSED[model_type]}.")
    if model_type not in FAMILIES:
        raise ImpossibleError(
            f"model_type {model_type!r} ({where}) is dense or not a family smoe knows. "
            f"Known: {', '.join(sorted(FAMILIES))}. {ADD_A_FAMILY}"
        )
    return FAMILIES[model_type]


def _layer(read: _Reader, layer: int, num_experts: int, top_k: int) -> MoeLayer:
    family = read.family
    if top_k > num_experts:
        keys = read.first(family.top_k_keys), read.first(family.experts_keys)
        raise InputError(f"{read.where}: {keys[0]} = {top_k} is more than {keys[1]} = {num_experts}.")
    zero = read.whole(family.zero_key, 0, least=0) if family.zero_key else family.zero_experts
    if _hashed(read, layer):
        return MoeLayer(layer, num_experts, top_k, 1, TOKEN_HASH, zero)
    groups, chosen = _effective_groups(read, num_experts, top_k)
    rule = family.rule if groups == 1 else f"{family.rule}, {chosen} of {groups} groups"
    return MoeLayer(layer, num_experts, top_k, groups, rule, zero)


def _hashed(read: _Reader, layer: int) -> bool:
    """Whether a layer finds its experts by token id: listed, or one of the first."""
    if not read.family.hash_key:
        return False
    kinds = read.get("mlp_layer_types")
    if isinstance(kinds, list):
        return layer < len(kinds) and kinds[layer] == "hash_moe"
    return layer < read.whole(read.family.hash_key, read.family.hash_first, least=0)


def _effective_groups(read: _Reader, num_experts: int, top_k: int) -> tuple[int, int]:
    """Groups that a renumbering has to respect and how many are chosen; (1, 1) where the rule commutes with any.

    Where a group scores as its best expert, K <= topk_group makes the rule vacuous: the K best experts always lie in
    the chosen groups. That does not hold for a sum of two.
    """
    family = read.family
    if not family.group_keys or (family.group_method_key and read.get(family.group_method_key) in (None, "greedy")):
        return 1, 1
    count_key, chosen_key = family.group_keys
    keys = (next((key for key in family.group_aliases if key in read.config), count_key), chosen_key)
    groups, chosen = (
        read.check(key, read.config.get(key, default) or 1)
        for key, default in zip(keys, family.group_defaults, strict=True)
    )
    if groups <= 1 or chosen >= groups or (family.group_score == "max" and top_k <= chosen):
        return 1, 1
    if num_experts % groups:
        raise InputError(f"{read.where}: {num_experts} experts do not divide into {keys[0]} = {groups} groups.")
    return groups, chosen
