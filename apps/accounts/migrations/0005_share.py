"""One share of queues and limits for all of a founder's organizations that never paid."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [('accounts', '0004_founder')]

    operations = [
        migrations.AddField(
            model_name='organization',
            name='has_own_share',
            field=models.BooleanField(db_default=False, help_text='It has paid, or an operator has set its limits. Until then it has one share of queues and limits together with the others its founder made.'),
        ),
    ]
