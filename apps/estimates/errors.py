"""What a question must not be: errors that name the field at fault, for forms and APIs to show beside it."""


class EstimateError(ValueError):
    """The question cannot be answered. `field` names the input that is missing, wrong or absurd."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
