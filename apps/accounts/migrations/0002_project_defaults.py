from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0001_initial'),
    ]

    operations = [
        migrations.AlterField(
            model_name='project',
            name='default_model',
            field=models.CharField(blank=True, db_default='', help_text='The base model of a new job that names none.', max_length=200),
        ),
        migrations.AlterField(
            model_name='project',
            name='default_pool',
            field=models.CharField(blank=True, db_default='', help_text='Its pool, if it can run it.', max_length=64),
        ),
        migrations.AddField(
            model_name='project',
            name='default_method',
            field=models.CharField(blank=True, db_default='', help_text='Its method, if the model has it.', max_length=8),
        ),
        migrations.AddField(
            model_name='project',
            name='default_suffix',
            field=models.CharField(blank=True, db_default='', help_text='Its suffix.', max_length=64),
        ),
        migrations.AlterField(
            model_name='projectmember',
            name='role',
            field=models.CharField(choices=[('member', 'member'), ('viewer', 'viewer'), ('admin', 'admin')], max_length=8),
        ),
    ]
