"""Errors of an estimate's input. They name the invalid field, so that forms and APIs can show them beside it."""


class EstimateError(ValueError):
    """The estimate is impossible. `field` names the input that is missing, wrong or absurd."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
