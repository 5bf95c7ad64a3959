"""A replica is asked only where an operator or the settings accepted its address, and not once it was found faulty."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [('serving', '0001_initial')]

    operations = [
        migrations.AddField(
            model_name='replica',
            name='is_address_accepted',
            field=models.BooleanField(db_default=True, help_text='By the settings or an operator.'),
        ),
        migrations.AddField(
            model_name='replica',
            name='isolated_at',
            field=models.DateTimeField(help_text='Found faulty: asked nothing until it is cleared.', null=True),
        ),
        migrations.AddField(
            model_name='replica',
            name='isolated_because',
            field=models.CharField(blank=True, db_default='', max_length=300),
        ),
        migrations.AddField(
            model_name='replica',
            name='fault_count',
            field=models.PositiveIntegerField(db_default=0, help_text='How often it was found faulty, ever.'),
        ),
    ]
