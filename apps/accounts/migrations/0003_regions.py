import django.contrib.postgres.fields
from django.db import migrations, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.state import StateApps


def add_home(apps: StateApps, schema_editor: BaseDatabaseSchemaEditor) -> None:
    apps.get_model("accounts", "Region").objects.create(name="local", is_home=True)


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0002_projects'),
    ]

    operations = [
        migrations.CreateModel(
            name='Region',
            fields=[
                ('name', models.CharField(max_length=40, primary_key=True, serialize=False)),
                ('is_home', models.BooleanField(default=False, help_text='Of one: the object store, the database and the gateways are there.')),
            ],
            options={
                'constraints': [models.UniqueConstraint(condition=models.Q(('is_home', True)), fields=('is_home',), name='region_home_once')],
            },
        ),
        migrations.RunPython(add_home, migrations.RunPython.noop),
        migrations.AddField(
            model_name='organization',
            name='regions',
            field=django.contrib.postgres.fields.ArrayField(base_field=models.CharField(max_length=40), help_text='Names of the regions that its data may be in, set by an operator; null: any.', null=True, size=None),
        ),
        migrations.AddConstraint(
            model_name='organization',
            constraint=models.CheckConstraint(condition=models.Q(('regions', None), ('regions__len__gt', 0), _connector='OR'), name='organization_has_a_region'),
        ),
        migrations.AddIndex(
            model_name='organization',
            index=models.Index(condition=models.Q(('regions__isnull', False)), fields=['id'], name='organization_limited'),
        ),
    ]
