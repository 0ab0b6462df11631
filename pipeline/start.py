"""A drafter that starts from the target's own last layers, or from another drafter, instead of random weights.

The drafter is as wide as its target and its layers have the target's shapes, so the target's last layers can be copied.
They expect the residual stream behind the last feature layer: `fc` starts by passing on just that feature, and
`hidden_norm` takes the norm with which the next layer would have read it, so at step 0 the context's keys and values are
those of the target itself. On two CPU cores, with little data, this halves the steps to a given loss (README).
"""
from pathlib import Path

import torch

from data_prep.errors import UserError
from data_prep.target import read_layers
from pipeline.drafter import DFlashDrafter, check_tensors

# Weight of q_norm and k_norm where the target has none: attention logits of about the spread such targets have.
HEAD_NORM = 1.5
# Size of the diagonal with which `fc` passes on a feature; hidden_norm cancels it, the optimizer's step is small beside it.
PASS = 0.06


def start_from_target(drafter: DFlashDrafter, target: Path) -> DFlashDrafter:
    """Copies the last `num_hidden_layers` layers of the target folder into `drafter`, in place.

    UserError where a layer of the target has other tensors than a drafter's layer (biases, experts, other widths).
    """
    config = drafter.config
    first = config.num_target_layers - config.num_hidden_layers
    after_features = config.target_layer_ids[-1] + 1
    stored = read_layers(target, {*range(first, config.num_target_layers), after_features})
    D = config.hidden_size
    with torch.no_grad():
        for layer, i in zip(drafter.layers, range(first, config.num_target_layers)):
            parameters = dict(layer.named_parameters())
            head_norms = {name: torch.full_like(p, HEAD_NORM) for name, p in parameters.items()
                          if name.endswith(("q_norm.weight", "k_norm.weight"))}
            tensors = head_norms | stored[i]
            try:
                check_tensors({n: tuple(p.shape) for n, p in parameters.items()},
                              {n: tuple(t.shape) for n, t in tensors.items()}, f"layer {i} of {target}")
            except UserError as error:
                raise UserError(f"{error}. Its layers do not fit into a drafter; set drafter.init to random") from error
            for name, parameter in parameters.items():
                parameter.copy_(tensors[name])
        drafter.fc.weight.zero_()
        drafter.fc.weight[:, -D:].fill_diagonal_(PASS)
        drafter.hidden_norm.weight.copy_(stored[after_features]["input_layernorm.weight"])
    return drafter


def start_from_drafter(drafter: DFlashDrafter, folder: Path) -> DFlashDrafter:
    """Copies the weights of the drafter in `folder` (exported here, or public) into `drafter`, in place.

    UserError where its tensors have other shapes, or where it reads other layers or another mask token: its weights
    would then mean something else.
    """
    other = DFlashDrafter.from_pretrained(folder)
    pairs = [(name, getattr(other.config, name), getattr(drafter.config, name)) for name in ("target_layer_ids", "mask_token_id")]
    differences = [f"{name} is {there} there and {here} here" for name, there, here in pairs if there != here]
    if differences:
        raise UserError(f"drafter.init_from {folder}: {'; '.join(differences)}; extract the dataset with its settings, or "
                        "start from another drafter")
    check_tensors({n: tuple(p.shape) for n, p in drafter.named_parameters()},
                  {n: tuple(p.shape) for n, p in other.named_parameters()}, f"drafter.init_from {folder}")
    drafter.load_state_dict(other.state_dict())
    return drafter
