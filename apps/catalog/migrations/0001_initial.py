"""Base models, GPU types, and prices."""

import apps.core.ids
import django.db.models.deletion
import django.db.models.functions.datetime
import pgtrigger.compiler
from apps.core.database.initial_migration import InitialMigration
from django.db import migrations, models

REFUSE_OVERLAP = """
    IF EXISTS (
        SELECT 1 FROM catalog_pricerule other
         WHERE other.id <> NEW.id AND other.sku = NEW.sku
           AND other.organization_id IS NOT DISTINCT FROM NEW.organization_id
           AND other.effective_from < coalesce(NEW.effective_to, 'infinity')
           AND NEW.effective_from < coalesce(other.effective_to, 'infinity')
    ) THEN
        RAISE EXCEPTION 'two prices of % at one time', NEW.sku USING ERRCODE = '23P01';
    END IF;
    RETURN NEW;
"""


class Migration(InitialMigration):
    dependencies = [
        ('accounts', '0001_initial'),
    ]

    operations = [
        migrations.CreateModel(
            name='BaseModel',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=29, prefix='bm', primary_key=True, separator='_', serialize=False)),
                ('name', models.SlugField(help_text='What customers put in `model`.', max_length=80, unique=True)),
                ('display_name', models.CharField(max_length=120)),
                ('repo', models.CharField(blank=True, max_length=160)),
                ('revision', models.CharField(blank=True, help_text='Commit, so that the weights cannot change.', max_length=64)),
                ('path', models.CharField(blank=True, max_length=400)),
                ('licence', models.CharField(blank=True, max_length=80)),
                ('is_gated', models.BooleanField(default=False)),
                ('config', models.JSONField(default=dict, help_text="The model's own config.json, or the seeded dimensions.")),
                ('parameter_count', models.BigIntegerField()),
                ('context_length', models.PositiveIntegerField()),
                ('chat_template', models.TextField(blank=True)),
                ('chat_template_sha256', models.CharField(blank=True, max_length=64)),
                ('tokenizer_key', models.CharField(blank=True, help_text='Object key of tokenizer.json.', max_length=200)),
                ('special_tokens', models.JSONField(default=dict, help_text='bos_token, eos_token, pad_token as the template sees them.')),
                ('files_sha256', models.JSONField(default=dict)),
                ('default_recipe', models.JSONField(default=dict, help_text='Hyperparameters that suit this model when none are given.')),
                ('source_url', models.URLField(blank=True, max_length=400)),
                ('is_installed', models.BooleanField(default=False, help_text='Weights, tokenizer and template are at hand.')),
                ('install_requested_at', models.DateTimeField(null=True)),
                ('install_error', models.CharField(blank=True, help_text="Why the hub's files were not taken.", max_length=500)),
                ('newer_revision', models.CharField(blank=True, help_text="The hub's head, if it has moved on.", max_length=64)),
                ('revision_checked_at', models.DateTimeField(null=True)),
                ('added_by', models.CharField(default='system', max_length=64)),
                ('created_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('retired_at', models.DateTimeField(null=True)),
            ],
        ),
        migrations.CreateModel(
            name='LicenceAcceptance',
            fields=[
                ('organization', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('id', apps.core.ids.IdField(editable=False, max_length=30, prefix='lic', primary_key=True, separator='_', serialize=False)),
                ('base_model', models.ForeignKey(on_delete=django.db.models.deletion.PROTECT, related_name='+', to='catalog.basemodel')),
                ('licence', models.CharField(blank=True, max_length=80)),
                ('accepted_by', models.CharField(max_length=64)),
                ('accepted_at', models.DateTimeField()),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(fields=('organization', 'base_model', 'licence'), name='licence_accepted_once'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='licence_append_only',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='UPDATE OR DELETE',
                            table='catalog_licenceacceptance',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot update or delete rows from % table', TG_TABLE_NAME;",
                            hash='a938c5aeb7b1a7f15f0d26ffbc67587df062200c',
                            pgid='pgtrigger_licence_append_only_320a1',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='GpuType',
            fields=[
                ('key', models.SlugField(max_length=40, primary_key=True, serialize=False)),
                ('name', models.CharField(max_length=80)),
                ('memory_bytes', models.BigIntegerField(help_text='Usable, as the driver reports it.')),
                ('specification', models.JSONField(default=dict)),
                ('source_url', models.URLField(blank=True, max_length=400)),
            ],
        ),
        migrations.CreateModel(
            name='PriceRule',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=32, prefix='price', primary_key=True, separator='_', serialize=False)),
                ('sku', models.CharField(help_text='training:<pool>, inference:input:<model>, inference:output:<model>, both also with :batch, warm:<model>, storage:bytes, conversion:bytes', max_length=120)),
                ('organization', models.ForeignKey(help_text='Null: everybody.', null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('unit', models.CharField(choices=[('gpu_ms', 'GPU milliseconds'), ('tokens', 'tokens'), ('warm_ms', 'milliseconds kept warm'), ('byte_hours', 'byte-hours'), ('bytes', 'bytes')], max_length=16)),
                ('price_nano', models.BigIntegerField()),
                ('per', models.BigIntegerField(help_text='Units that price buys, e.g. 3600000 GPU milliseconds.')),
                ('tiers', models.JSONField(default=list, help_text='[{from_units, price_nano}], ascending: what units beyond so many a calendar month cost instead.')),
                ('effective_from', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('effective_to', models.DateTimeField(null=True)),
                ('created_by', models.CharField(max_length=64)),
                ('approved_by', models.CharField(help_text='The second operator of a gift.', max_length=64, null=True)),
            ],
            options={
                'constraints': [
                    models.UniqueConstraint(condition=models.Q(('effective_to', None)), fields=('sku', 'organization'), name='price_one_active', nulls_distinct=False),
                    models.CheckConstraint(condition=models.Q(('per__gt', 0), ('price_nano__gte', 0)), name='price_positive'),
                    models.CheckConstraint(condition=models.Q(('organization', None), models.Q(('approved_by__isnull', False), models.Q(('approved_by', models.F('created_by')), _negated=True)), _connector='OR'), name='price_own_by_two'),
                    models.CheckConstraint(condition=models.Q(('effective_to', None), ('effective_to__gt', models.F('effective_from')), _connector='OR'), name='price_period'),
                ],
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='price_no_delete',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='DELETE',
                            table='catalog_pricerule',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot delete rows from % table', TG_TABLE_NAME;",
                            hash='7a139e449c0aec3d8747c67b59cb736bb580f5f7',
                            pgid='pgtrigger_price_no_delete_33da1',
                        ),
                    ),
                    pgtrigger.compiler.Trigger(
                        name='price_free_by_two',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            condition='WHEN (NEW."organization_id" IS NULL AND NEW."price_nano" = 0 AND (NEW."approved_by" IS NULL OR NEW."approved_by" = (NEW."created_by")))',
                            operation='INSERT',
                            table='catalog_pricerule',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot insert rows from % table', TG_TABLE_NAME;",
                            hash='efa0ed4063b3fe08f84916200ad5c77d680f1860',
                            pgid='pgtrigger_price_free_by_two_f247d',
                        ),
                    ),
                    pgtrigger.compiler.Trigger(
                        name='price_frozen',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            condition='WHEN (OLD."sku" IS DISTINCT FROM (NEW."sku") OR OLD."organization_id" IS DISTINCT FROM (NEW."organization_id") OR OLD."unit" IS DISTINCT FROM (NEW."unit") OR OLD."price_nano" IS DISTINCT FROM (NEW."price_nano") OR OLD."per" IS DISTINCT FROM (NEW."per") OR OLD."tiers" IS DISTINCT FROM (NEW."tiers") OR OLD."effective_from" IS DISTINCT FROM (NEW."effective_from") OR OLD."created_by" IS DISTINCT FROM (NEW."created_by") OR OLD."approved_by" IS DISTINCT FROM (NEW."approved_by"))',
                            operation='UPDATE',
                            table='catalog_pricerule',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot update rows from % table', TG_TABLE_NAME;",
                            hash='da6273ef7a7847fcc8e88e7b104823a89406932b',
                            pgid='pgtrigger_price_frozen_4512b',
                        ),
                    ),
                    pgtrigger.compiler.Trigger(
                        name='price_no_overlap',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='INSERT OR UPDATE OF "effective_to"',
                            table='catalog_pricerule',
                            when='BEFORE',
                            func=REFUSE_OVERLAP,
                            hash='3319635411e1f6f7b9c45ea3e2b2f77a117ee9db',
                            pgid='pgtrigger_price_no_overlap_fbf06',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='HubToken',
            fields=[
                ('base_model', models.OneToOneField(on_delete=django.db.models.deletion.CASCADE, primary_key=True, related_name='hub_token', serialize=False, to='catalog.basemodel')),
                ('token_sealed', models.BinaryField()),
            ],
        ),
        migrations.CreateModel(
            name='PriceRequest',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=35, prefix='priceask', primary_key=True, separator='_', serialize=False)),
                ('organization', models.ForeignKey(help_text='Null: everybody.', null=True, on_delete=django.db.models.deletion.PROTECT, related_name='+', to='accounts.organization')),
                ('sku', models.CharField(max_length=120)),
                ('price_nano', models.BigIntegerField()),
                ('per', models.BigIntegerField()),
                ('tiers', models.JSONField(default=list)),
                ('effective_from', models.DateTimeField(help_text='Null, or past when it is approved: at once.', null=True)),
                ('requested_by', models.CharField(max_length=64)),
                ('requested_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('decided_by', models.CharField(max_length=64, null=True)),
                ('decided_at', models.DateTimeField(null=True)),
                ('rule', models.OneToOneField(help_text='Null: open, or rejected.', null=True, on_delete=django.db.models.deletion.PROTECT, to='catalog.pricerule')),
            ],
            options={
                'triggers': [
                    pgtrigger.compiler.Trigger(
                        name='price_request_no_delete',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            operation='DELETE',
                            table='catalog_pricerequest',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot delete rows from % table', TG_TABLE_NAME;",
                            hash='017cdb9bf160e78c8dad15b1c77e78fc829ecfee',
                            pgid='pgtrigger_price_request_no_delete_99bce',
                        ),
                    ),
                    pgtrigger.compiler.Trigger(
                        name='price_request_frozen',
                        sql=pgtrigger.compiler.UpsertTriggerSql(
                            condition='WHEN (OLD."organization_id" IS DISTINCT FROM (NEW."organization_id") OR OLD."sku" IS DISTINCT FROM (NEW."sku") OR OLD."price_nano" IS DISTINCT FROM (NEW."price_nano") OR OLD."per" IS DISTINCT FROM (NEW."per") OR OLD."tiers" IS DISTINCT FROM (NEW."tiers") OR OLD."effective_from" IS DISTINCT FROM (NEW."effective_from") OR OLD."requested_by" IS DISTINCT FROM (NEW."requested_by"))',
                            operation='UPDATE',
                            table='catalog_pricerequest',
                            when='BEFORE',
                            func="RAISE EXCEPTION 'pgtrigger: Cannot update rows from % table', TG_TABLE_NAME;",
                            hash='618febc3175bf03da65939602b2d0fceee14b588',
                            pgid='pgtrigger_price_request_frozen_8f797',
                        ),
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name='HubLookup',
            fields=[
                ('id', apps.core.ids.IdField(editable=False, max_length=30, prefix='hub', primary_key=True, separator='_', serialize=False)),
                ('repo', models.CharField(max_length=200)),
                ('revision', models.CharField(blank=True, help_text='Empty: the newest one.', max_length=64)),
                ('token_sealed', models.BinaryField(null=True)),
                ('requested_by', models.CharField(max_length=64)),
                ('requested_at', models.DateTimeField(db_default=django.db.models.functions.datetime.Now())),
                ('answered_at', models.DateTimeField(null=True)),
                ('repository', models.JSONField(help_text='apps.catalog.hub.HubRepository; null if the hub refused it.', null=True)),
                ('model', models.JSONField(help_text='Name, config.json, parameters; null if it cannot be used.', null=True)),
                ('refusal', models.CharField(blank=True, help_text='Why it cannot be installed.', max_length=500)),
                ('base_model', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='catalog.basemodel')),
            ],
        ),
    ]
