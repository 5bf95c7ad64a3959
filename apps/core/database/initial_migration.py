"""The base of each app's first migration: Django renders all models once for it, not once for each operation.

Rendering was nearly all that the migration of an empty database cost: most tables here lead to an organization, so that
each operation renders dozens of models again.
"""

from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations import Migration
from django.db.migrations.state import ProjectState


class InitialMigration(Migration):
    """Creates complete tables: a CreateModel holds every field, index, constraint and trigger of its model.

    Each operation sees the models as they are after the last one. So foreign keys may lead in circles, and an AddField
    or AddIndex has no place here: the CreateModel before it has already made what it would add.
    """

    initial = True

    def mutate_state(self, project_state: ProjectState, preserve: bool = True) -> ProjectState:
        """Return the state after all operations, its models not yet rendered."""
        state = project_state.clone() if preserve else project_state
        state.__dict__.pop("apps", None)
        return super().mutate_state(state, preserve=False)

    def apply(
        self, project_state: ProjectState, schema_editor: BaseDatabaseSchemaEditor, collect_sql: bool = False
    ) -> ProjectState:
        """Run every operation forwards and return the state after them."""
        after = self.mutate_state(project_state)
        for operation in self.operations:
            operation.database_forwards(self.app_label, schema_editor, project_state, after)
        return after
