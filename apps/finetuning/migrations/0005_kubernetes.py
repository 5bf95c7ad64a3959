import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('finetuning', '0004_conversion_cancellation'),
    ]

    operations = [
        migrations.AlterField(
            model_name='poolcapacity',
            name='kind',
            field=models.CharField(choices=[('static', 'You: machines join by hand'), ('slurm', 'Slurm: Anneal submits and cancels jobs'), ('kubernetes', 'Kubernetes: Anneal creates and deletes Jobs')], default='static', max_length=10),
        ),
        migrations.CreateModel(
            name='CapacityToken',
            fields=[
                ('capacity', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='+', serialize=False, to='finetuning.poolcapacity')),
                ('token_sealed', models.BinaryField()),
            ],
        ),
    ]
