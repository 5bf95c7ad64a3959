"""The permissions of each role. A permission that is not listed is not granted."""

from enum import StrEnum
from typing import ClassVar


class Permission(StrEnum):
    VIEW = "view"
    DATASET_WRITE = "dataset.write"
    JOB_WRITE = "job.write"
    ADAPTER_WRITE = "adapter.write"
    ADAPTER_DELETE = "adapter.delete"
    INFERENCE = "inference"
    KEY_MANAGE = "key.manage"
    MEMBER_MANAGE = "member.manage"
    AUDIT_READ = "audit.read"
    WEBHOOK_MANAGE = "webhook.manage"
    ORGANIZATION_MANAGE = "organization.manage"


class Role:
    name: ClassVar[str]
    permissions: ClassVar[frozenset[Permission]]


class Viewer(Role):
    name = "viewer"
    permissions = frozenset({Permission.VIEW})


class Member(Role):
    name = "member"
    permissions = Viewer.permissions | {
        Permission.DATASET_WRITE,
        Permission.JOB_WRITE,
        Permission.ADAPTER_WRITE,
        Permission.INFERENCE,
        Permission.KEY_MANAGE,
    }


class Admin(Role):
    name = "admin"
    permissions = Member.permissions | {
        Permission.ADAPTER_DELETE,
        Permission.MEMBER_MANAGE,
        Permission.AUDIT_READ,
        Permission.WEBHOOK_MANAGE,
    }


class Owner(Role):
    name = "owner"
    permissions = frozenset(Permission)


ROLES: dict[str, type[Role]] = {role.name: role for role in (Viewer, Member, Admin, Owner)}
ROLE_CHOICES = [(name, name) for name in ROLES]

# The scopes of API keys; each is a permission. A key never has more than its creator's role at the time of use.
SCOPES = tuple(
    permission.value
    for permission in (
        Permission.VIEW,
        Permission.DATASET_WRITE,
        Permission.JOB_WRITE,
        Permission.ADAPTER_WRITE,
        Permission.ADAPTER_DELETE,
        Permission.INFERENCE,
        Permission.AUDIT_READ,
        Permission.KEY_MANAGE,
        Permission.MEMBER_MANAGE,
        Permission.ORGANIZATION_MANAGE,
        Permission.WEBHOOK_MANAGE,
    )
)


def has_permission(role: str, permission: Permission) -> bool:
    return permission in ROLES[role].permissions
