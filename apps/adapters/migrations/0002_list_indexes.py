from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('adapters', '0001_initial'),
    ]

    operations = [
        migrations.AddIndex(
            model_name='adapterversion',
            index=models.Index(condition=models.Q(('deleted_at', None)), fields=['organization'], include=['bytes'], name='adapter_version_kept'),
        ),
        migrations.AddIndex(
            model_name='adapterversion',
            index=models.Index(condition=models.Q(('deleted_at', None), models.Q(('exports', []), _negated=True)), fields=['organization'], name='adapter_version_exported'),
        ),
    ]
