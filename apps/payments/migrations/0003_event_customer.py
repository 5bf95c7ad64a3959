from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('payments', '0002_topup_declined_at'),
    ]

    operations = [
        migrations.AddField(
            model_name='stripeevent',
            name='customer_id',
            field=models.CharField(blank=True, db_default='', help_text='In whose turn it is handled; empty: in one of all.', max_length=255),
        ),
    ]
