from django.conf import settings
from django.db import migrations, models


def price_batches(apps, schema_editor):
    """Give each price of tokens that counts now or later its price in batches, from now on.

    A price of 0 that one operator set alone is left out: batches have the usual price where they have none.
    """
    rules = apps.get_model('catalog', 'PriceRule').objects
    off = settings.BATCH_REDUCTION_PERCENT

    def reduced(nano):
        return max((2 * nano * (100 - off) + 100) // 200, min(nano, 1))

    with schema_editor.connection.cursor() as cursor:
        cursor.execute('SELECT clock_timestamp()')
        now = cursor.fetchone()[0]
    current = rules.filter(sku__startswith='inference:').exclude(sku__endswith=':batch')
    for rule in current.filter(models.Q(effective_to=None) | models.Q(effective_to__gt=now)):
        if not rule.price_nano and rule.approved_by is None:
            continue
        rules.create(
            sku=rule.sku + ':batch', organization_id=rule.organization_id, unit=rule.unit,
            price_nano=reduced(rule.price_nano), per=rule.per,
            tiers=[tier | {'price_nano': reduced(tier['price_nano'])} for tier in rule.tiers],
            effective_from=max(rule.effective_from, now), effective_to=rule.effective_to,
            created_by=rule.created_by, approved_by=rule.approved_by,
        )


class Migration(migrations.Migration):

    dependencies = [
        ('catalog', '0002_conversion_prices'),
    ]

    operations = [
        migrations.AlterField(
            model_name='pricerule',
            name='sku',
            field=models.CharField(help_text='training:<pool>, inference:input:<model>, inference:output:<model>, both also with :batch, warm:<model>, storage:bytes, conversion:bytes', max_length=120),
        ),
        migrations.RunPython(price_batches, migrations.RunPython.noop),
    ]
