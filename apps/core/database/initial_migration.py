"""Base class of the initial migrations. Django renders all models once per migration, not once per operation.

Rendering took nearly all the time to migrate an empty database: most tables lead to an organization, so each operation
rendered dozens of models again.
"""

from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations import Migration
from django.db.migrations.state import ProjectState


class InitialMigration(Migration):
    """Creates complete tables: a CreateModel holds every field, index, constraint and trigger of its model.

    Each operation sees the models as they are after the last operation, so foreign keys may form cycles. Use no
    AddField or AddIndex here, because the CreateModel before it has already created the field or index.
    """

    initial = True

    def mutate_state(self, project_state: ProjectState, preserve: bool = True) -> ProjectState:
        """Return the state after all operations, with its models not yet rendered."""
        state = project_state.clone() if preserve else project_state
        state.__dict__.pop("apps", None)
        return super().mutate_state(state, preserve=False)

    def apply(
        self, project_state: ProjectState, schema_editor: BaseDatabaseSchemaEditor, collect_sql: bool = False
    ) -> ProjectState:
        """Run every operation forwards and return the resulting state."""
        after = self.mutate_state(project_state)
        for operation in self.operations:
            operation.database_forwards(self.app_label, schema_editor, project_state, after)
        return after
