"""Recording a model's routing: packing prompts, hooking the experts' input, running the forward passes."""
