"""An alias may have the whole name of a model at another service, once in each organization."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0010_user_language'),
        ('adapters', '0004_missing_parts'),
        ('serving', '0003_replica_token'),
    ]

    operations = [
        migrations.AlterField(
            model_name='alias',
            name='model_name',
            field=models.CharField(help_text='ft:<base>:<organization>:<suffix>:<name>', max_length=240),
        ),
        migrations.AlterField(
            model_name='alias',
            name='name',
            field=models.CharField(help_text='Of an imported alias, the whole name.', max_length=240),
        ),
        migrations.AddConstraint(
            model_name='alias',
            constraint=models.UniqueConstraint(fields=('organization', 'model_name'), name='alias_model_name_once'),
        ),
    ]
