"""The errors that exkv raises beyond Python's own; everything else is ValueError and its kin."""


class PlacementError(RuntimeError):
    """The model, its caches and their workspace do not fit on the devices given.

    Raised before anything is loaded when the plan says so, or after a real out-of-memory error
    on the last device; either way every device is left as it was found. The message names the
    unit, the device, the bytes needed and available there, and changes that would make it fit.

    Attributes:
        unit: name of the first unit that found no place, e.g. ``"model.layers.17"``.
        device: the last device that was considered for it, as a string.
        needed: bytes that the device would have to hold.
        available: bytes that it has for this model.
        suggestions: changes that were computed to fit, mildest first.
    """

    def __init__(
        self,
        message: str,
        *,
        unit: str,
        device: str,
        needed: int,
        available: int,
        suggestions: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.unit = unit
        self.device = device
        self.needed = needed
        self.available = available
        self.suggestions = suggestions
