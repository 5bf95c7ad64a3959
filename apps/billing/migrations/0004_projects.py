"""A hold says which project it is of, and a project may have a budget."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0003_sums_of_holds'),
    ]

    operations = [
        migrations.AddField(
            model_name='hold',
            name='project_id',
            field=models.CharField(blank=True, db_default='', help_text='Of the job or key; empty: it is older than projects.', max_length=40),
        ),
        migrations.AlterField(
            model_name='budget',
            name='scope',
            field=models.CharField(choices=[('organization', 'the whole organization'), ('label', 'a metadata label'), ('key', 'an API key'), ('member', 'a member'), ('project', 'a project')], max_length=16),
        ),
        migrations.AlterField(
            model_name='budget',
            name='target',
            field=models.CharField(blank=True, help_text='name=value, or the id of the key, member or project.', max_length=600),
        ),
    ]
