"""Tell the holds of jobs from before at which price they were charged, and to whom they are charged back."""

from django.db import migrations


def fill_holds(apps, schema_editor):
    """Copy price, starter and metadata of each job to its holds that have none. Again, it finds nothing to do."""
    Hold, Job = apps.get_model("billing", "Hold"), apps.get_model("finetuning", "FineTuningJob")
    makers = dict(apps.get_model("accounts", "ApiKey").objects.values_list("pk", "created_by_id"))
    bare = Hold.objects.filter(purpose="job", price_rule=None)
    jobs = Job.objects.filter(pk__in=bare.values("source")).exclude(price_rule=None)
    for job in jobs.iterator(chunk_size=500):
        by = job.created_by
        bare.filter(source=job.pk).update(
            price_rule_id=job.price_rule_id,
            key_id=by if by.startswith("key_") else "",
            member_id=by if by.startswith("user_") else makers.get(by, ""),
            labels={str(name): str(value) for name, value in job.metadata.items()},
        )


class Migration(migrations.Migration):

    dependencies = [
        ('accounts', '0002_find_api_key'),
        ('billing', '0008_invoices'),
        ('finetuning', '0001_initial'),
    ]

    operations = [migrations.RunPython(fill_holds, migrations.RunPython.noop)]
