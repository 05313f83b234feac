"""How many tokens to draft in a step: fixed, or chosen by acceptance and by what a step costs. No tensors."""
