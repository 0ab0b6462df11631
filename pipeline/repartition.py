"""A checkpoint read by another number of ranks than wrote it.

ZeRO's files hold one flat float32 piece per rank of the master weights and of both Adam moments. Together with the
shapes stored beside them they give every parameter by its name, from which the pieces of any other number of ranks are
cut. No converted copy is written; files are mapped, not read, and at most one whole parameter is in memory at a time.

ZeRO-3 cuts each parameter into `ranks` pieces of equal length, the last one padded, and concatenates the pieces in the
order of the parameters. ZeRO-1 and 2 concatenate the parameters and cut the result.
"""
from pathlib import Path

import deepspeed
import torch
from torch import Tensor

from data_prep.errors import UserError

MOMENTS = ("exp_avg", "exp_avg_sq")


class SavedState:
    """Master weights and Adam moments of a checkpoint by parameter name, in float32 and whole."""

    def __init__(self, folder: Path, ranks: int):
        self.folder, self.ranks = folder, ranks
        model = torch.load(self._model_file(folder), map_location="cpu", mmap=True, weights_only=False)
        self.shapes = {name: shape for group in model["param_shapes"] for name, shape in group.items()}
        states = [self._optimizer_state(rank) for rank in range(ranks)]
        self.stage = int(states[0]["zero_stage"])
        adam = [s["optimizer_state_dict" if self.stage == 3 else "base_optimizer_state"] for s in states]
        weights = [s["fp32_flat_groups" if self.stage == 3 else "single_partition_of_fp32_groups"] for s in states]
        self.hyperparameters = {name: value for name, value in adam[0]["param_groups"][0].items() if name != "params"}
        self.adam_step = adam[0]["state"][0]["step"]
        self._first, at = {}, 0  # where a parameter begins: in every rank's concatenation, or in that of all ranks
        for name, shape in self.shapes.items():
            self._first[name] = at
            at += -(-shape.numel() // ranks) if self.stage == 3 else shape.numel()
        # key -> rank -> flat pieces; a moment's piece may be padded behind what belongs to a parameter.
        self._pieces = {"fp32": weights} | {
            key: [[state["state"][i][key] for i in sorted(state["state"])] for state in adam] for key in MOMENTS}

    @staticmethod
    def _model_file(folder: Path) -> Path:
        names = ("zero_pp_rank_0_mp_rank_00_model_states.pt", "mp_rank_00_model_states.pt")
        found = [folder / name for name in names if (folder / name).is_file()]
        if not found:
            raise UserError(f"{folder} has none of {', '.join(names)}: files of the checkpoint are gone; resume from another")
        return found[0]

    def _optimizer_state(self, rank: int) -> dict:
        found = sorted(self.folder.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))
        if len(found) != 1:
            raise UserError(f"{self.folder} was saved by {self.ranks} ranks and has {len(found)} optimizer files of rank "
                            f"{rank}: files of the checkpoint are gone; resume from another")
        return torch.load(found[0], map_location="cpu", mmap=True, weights_only=False)["optimizer_state_dict"]

    def read(self, key: str, name: str) -> Tensor:
        """The whole parameter `name`, flat; key: fp32, exp_avg or exp_avg_sq."""
        count, first = self.shapes[name].numel(), self._first[name]
        if self.stage == 3:
            per_rank = -(-count // self.ranks)
            return torch.cat([_cut(pieces, first, per_rank) for pieces in self._pieces[key]])[:count]
        return _cut([piece for pieces in self._unpadded(key) for piece in pieces], first, count)

    def _unpadded(self, key: str) -> list[list[Tensor]]:
        """Stages 1 and 2 save the weights without the padding at the end of the last rank's piece, the moments with it."""
        return [[piece[:weight.numel()] for piece, weight in zip(pieces, weights)]
                for pieces, weights in zip(self._pieces[key], self._pieces["fp32"])]


def _cut(pieces: list[Tensor], first: int, count: int) -> Tensor:
    """Elements first..first+count-1 of the concatenation of `pieces`, which is never built."""
    found = []
    for piece in pieces:
        length = piece.numel()
        if first < length and count > 0:
            part = piece[first:first + count]
            found.append(part)
            count -= part.numel()
        first = max(0, first - length)
    return torch.cat(found)


def load_repartitioned(engine, folder: Path, saved_ranks: int, rank: int, world: int) -> None:
    """Restores weights and optimizer state of the checkpoint in `folder` into `engine`, which has `world` ranks.

    UserError where the ZeRO stage changed or the optimizer state lies on NVMe.
    """
    stage = engine.zero_optimization_stage()
    saved = SavedState(folder, saved_ranks)
    if saved.stage != stage or engine.zero_nvme_offload_optimizer():
        raise UserError(f"{folder} was saved by {saved_ranks} ranks under ZeRO-{saved.stage} and this run has {world} under "
                        f"ZeRO-{stage}{' with NVMe offload' if engine.zero_nvme_offload_optimizer() else ''}: another number "
                        f"of ranks needs the same stage and no NVMe; use the DeepSpeed JSON of that run")
    optimizer = engine.optimizer
    common = {"loss_scaler": optimizer.loss_scaler, "dynamic_loss_scale": optimizer.dynamic_loss_scale, "overflow": False,
              "zero_stage": saved.stage, "partition_count": optimizer.partition_count}
    if stage == 3:
        optimizer.checkpoint_event_prologue()
        groups, flats = optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat
        pieces = {key: [_zero3_piece(saved, key, engine.param_names, group, flat.numel(), rank)
                        for group, flat in zip(groups, flats)] for key in ("fp32", *MOMENTS)}
        state = common | {"fp32_flat_groups": pieces["fp32"], "optimizer_state_dict": _adam(saved, pieces)}
    else:
        flats = optimizer.single_partition_of_fp32_groups
        names = [engine.param_names[p] for group in optimizer.round_robin_bit16_groups for p in group]
        pieces = {key: [_flat_piece(saved, key, names, flats[0].numel(), rank)] for key in ("fp32", *MOMENTS)}
        state = common | {"clip_grad": optimizer.clip_grad, "base_optimizer_state": _adam(saved, pieces),
                          "single_partition_of_fp32_groups": pieces["fp32"], "group_paddings": optimizer.groups_padding,
                          "param_alignment_paddings": optimizer.round_robin_bit16_padding,
                          "ds_version": deepspeed.__version__}
    # DeepSpeed takes a list with one entry per rank and looks at its own only.
    optimizer.load_state_dict([state] * world, load_from_fp32_weights=True)
    if stage == 3:
        optimizer.checkpoint_event_epilogue()
    else:
        with torch.no_grad():
            for parameter, name in engine.param_names.items():
                parameter.copy_(saved.read("fp32", name).view_as(parameter))


def _zero3_piece(saved: SavedState, key: str, names: dict, group: list, length: int, rank: int) -> Tensor:
    """This rank's flat piece of a sub-group of parameters: equal cuts of each, padded with zeros."""
    flat, at = torch.zeros(length), 0
    for parameter in group:
        per_rank = parameter.partition_numel()
        part = saved.read(key, names[parameter])[rank * per_rank:(rank + 1) * per_rank]
        flat[at:at + part.numel()] = part
        at += per_rank
    return flat


def _flat_piece(saved: SavedState, key: str, names: list[str], length: int, rank: int) -> Tensor:
    """This rank's cut of all parameters behind one another, padded with zeros."""
    flat, first = torch.zeros(length), -rank * length
    for name in names:
        whole = saved.read(key, name)
        part = whole[max(0, -first):max(0, length - first)]
        flat[max(0, first):max(0, first) + part.numel()] = part
        first += whole.numel()
    return flat


def _adam(saved: SavedState, pieces: dict[str, list[Tensor]]) -> dict:
    count = len(pieces["fp32"])
    state = {i: {"step": saved.adam_step, **{key: pieces[key][i] for key in MOMENTS}} for i in range(count)}
    return {"state": state, "param_groups": [{**saved.hyperparameters, "params": list(range(count))}]}
