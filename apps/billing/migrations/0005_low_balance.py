"""Organizations get notice of a low balance once, until it recovers."""

from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('billing', '0004_credit_requests'),
    ]

    operations = [
        migrations.AddField(
            model_name='billingprofile',
            name='low_balance_at',
            field=models.DateTimeField(help_text='When its members got notice of its low balance.', null=True),
        ),
    ]
