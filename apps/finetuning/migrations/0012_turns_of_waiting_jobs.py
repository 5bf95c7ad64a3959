from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('finetuning', '0011_regions'),
    ]

    operations = [
        migrations.AddField(
            model_name='finetuningjob',
            name='checked_at',
            field=models.DateTimeField(help_text='When it was last looked at while it waited for its files.', null=True),
        ),
        migrations.AlterField(
            model_name='runupload',
            name='verified_at',
            field=models.DateTimeField(help_text='When every file had the promised hash; those of a checkpoint, the size.', null=True),
        ),
    ]
