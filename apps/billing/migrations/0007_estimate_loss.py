"""Add the account and the posting of the time that a firm price leaves unpaid."""

from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [('billing', '0006_traffic_hours')]

    operations = [
        migrations.AlterField(
            model_name='ledgeraccount',
            name='kind',
            field=models.CharField(choices=[('wallet', 'Wallet'), ('hold', 'Hold'), ('revenue', 'Revenue'), ('promotional_credit', 'Promotional Credit'), ('cash_clearing', 'Cash Clearing'), ('adjustment', 'Adjustment'), ('receivable', 'Receivable'), ('stripe_fees', 'Stripe Fees'), ('tax_payable', 'Tax Payable'), ('breakage', 'Breakage'), ('estimate_loss', 'Estimate Loss')], max_length=24),
        ),
        migrations.AlterField(
            model_name='ledgertransaction',
            name='kind',
            field=models.CharField(choices=[('grant', 'Credit granted'), ('hold', 'Held'), ('settle', 'Charge settled, hold released'), ('refund', 'Given back'), ('usage', 'Usage charged'), ('topup', 'Paid in'), ('expiry', 'Credit expired'), ('adjustment', 'Adjusted by the operator'), ('rebate', 'Given back for volume'), ('reversal', 'Reversed'), ('debt_paid', 'Debt paid'), ('payment_reversed', 'Payment taken back'), ('payment_refunded', 'Paid back'), ('release', 'Hold released'), ('stripe_fee', "Stripe's fee"), ('estimate_loss', 'Time above the firm price, at our expense')], max_length=32),
        ),
    ]
