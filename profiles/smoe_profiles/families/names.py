"""Names that many rows of the table of families share: tensors, modules, config keys, rules."""

GATE_UP_DOWN = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
W1_W3_W2 = ("w1.weight", "w3.weight", "w2.weight")
FUSED: tuple[str, ...] = ()
TWO_LINEAR = ("input_linear.", "output_linear.")
MLP = "model.layers.{layer}.mlp"
SPARSE = "model.layers.{layer}.block_sparse_moe"
TEXT_MLP = "model.language_model.layers.{layer}.mlp"
FEED_FORWARD = "model.layers.{layer}.feed_forward"
TEXT_EMBEDDING = "model.language_model.embed_tokens.weight"
OLD_TEXT_EMBEDDING = "language_model.model.embed_tokens.weight"
TEXT_LAYERS = "language_model.layers"
GATE = ("gate.weight",)
GATE_BIAS = ("gate.weight", "gate.e_score_correction_bias")
BIAS_IN_BLOCK = ("gate.weight", "e_score_correction_bias")
SHARED = ("shared_experts.",)
SHARED_GATED = ("shared_expert.", "shared_expert_gate.")
NUM_EXPERTS = ("num_experts", "num_local_experts")
NUM_LOCAL_EXPERTS = ("num_local_experts", "num_experts")
N_ROUTED_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
CHOSEN_ONLY = "softmax of the chosen"
SIGMOID_BIAS = "sigmoid + bias"
