"""Name the kinds of postings; drop a kind of requests that was always the same."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [('billing', '0002_output_bytes')]

    operations = [
        migrations.AlterField(
            model_name='ledgertransaction',
            name='kind',
            field=models.CharField(choices=[('grant', 'Credit granted'), ('hold', 'Held'), ('settle', 'Charge settled, hold released'), ('refund', 'Given back'), ('usage', 'Usage charged'), ('topup', 'Paid in'), ('expiry', 'Credit expired'), ('adjustment', 'Adjusted by the operator'), ('rebate', 'Given back for volume'), ('reversal', 'Reversed'), ('debt_paid', 'Debt paid'), ('payment_reversed', 'Payment taken back'), ('payment_refunded', 'Paid back'), ('release', 'Hold released'), ('stripe_fee', "Stripe's fee")], max_length=32),
        ),
        migrations.RemoveField(model_name='usageevent', name='kind'),
    ]
