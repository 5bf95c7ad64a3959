"""The policy of an organization to demand a second factor of its members."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("accounts", "0002_invitation_address")]

    operations = [
        migrations.AddField(
            model_name="organization",
            name="requires_second_factor",
            field=models.BooleanField(
                default=False, help_text="Its pages open only for members who have shown a second factor."
            ),
        ),
    ]
