"""Learning rate as a function of the optimizer step alone, so that no resume can lose or shift it."""
import math


def learning_rate(step: int, total: int, *, peak: float, minimum: float, warmup_ratio: float) -> float:
    """Linear warm-up over `warmup_ratio` of the steps, then a cosine that reaches `minimum` at the last step.

    step: 0-based optimizer step of `total`.
    """
    warmup = round(warmup_ratio * total)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - 1 - warmup)
    return minimum + (peak - minimum) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
