"""initial schema

Revision: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from procrastinate.schema import SchemaManager
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute(sa.schema.CreateSequence(sa.Sequence("records_seq")))
    op.create_table(
        "api_keys",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("digest"),
        sa.UniqueConstraint("name"),
    )
    op.create_table(
        "captures",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("record_id", sa.Uuid(), nullable=False),
        sa.Column("server", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("draft_version", sa.Text(), nullable=False),
        sa.Column("segment", sa.Text(), nullable=False),
        sa.Column("captured_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("prompt_token_ids", sa.ARRAY(sa.Integer()), nullable=False),
        sa.Column("output_token_ids", sa.ARRAY(sa.Integer()), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("record_id"),
    )
    op.create_index(
        "ix_captures_pick", "captures", ["server", "target", "segment", "captured_at"], unique=False
    )
    op.create_table(
        "fold_positions",
        sa.Column("reader", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("reader"),
    )
    op.create_table(
        "records",
        sa.Column("record_id", sa.Uuid(), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("stream_id", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("segment", sa.Text(), nullable=False),
        sa.Column("session", sa.Text(), nullable=True),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("drafted", sa.BigInteger(), nullable=False),
        sa.Column("accepted", sa.BigInteger(), nullable=False),
        sa.Column("emitted", sa.BigInteger(), nullable=False),
        sa.Column("drafted_per_position", sa.ARRAY(sa.BigInteger()), nullable=True),
        sa.Column("accepted_per_position", sa.ARRAY(sa.BigInteger()), nullable=True),
        sa.Column("num_speculative_tokens", sa.Integer(), nullable=True),
        sa.Column("acceptance_rule", sa.Text(), nullable=False),
        sa.Column("temperature", sa.Double(), nullable=True),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=True),
        sa.Column("output_tokens", sa.BigInteger(), nullable=True),
        sa.Column("time_to_first_token_seconds", sa.Double(), nullable=True),
        sa.Column("time_per_output_token_seconds", sa.Double(), nullable=True),
        sa.Column("concurrency", sa.BigInteger(), nullable=True),
        sa.Column("fidelity", sa.Text(), nullable=False),
        sa.CheckConstraint("accepted <= drafted", name="ck_records_accepted"),
        sa.CheckConstraint("emitted <= accepted + steps", name="ck_records_emitted"),
        sa.PrimaryKeyConstraint("record_id", "ended_at"),
        postgresql_partition_by="RANGE (ended_at)",
    )
    op.create_index("ix_records_seq", "records", ["seq"], unique=False)
    op.create_index("ix_records_stream_ended_at", "records", ["stream_id", "ended_at"], unique=False)
    op.create_table(
        "rollups_1m",
        sa.Column("minute", sa.DateTime(timezone=True), nullable=False),
        sa.Column("stream_id", sa.BigInteger(), nullable=False),
        sa.Column("segment", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("records", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("drafted", sa.BigInteger(), nullable=False),
        sa.Column("accepted", sa.BigInteger(), nullable=False),
        sa.Column("emitted", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("acceptance_buckets", sa.ARRAY(sa.BigInteger()), nullable=False),
        sa.Column("time_per_output_token_sum", sa.Double(), nullable=False),
        sa.Column("time_per_output_token_count", sa.BigInteger(), nullable=False),
        sa.Column("time_to_first_token_sum", sa.Double(), nullable=False),
        sa.Column("time_to_first_token_count", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("minute", "stream_id", "segment", "kind"),
    )
    op.create_table(
        "streams",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("server", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("draft", sa.Text(), nullable=False),
        sa.Column("draft_version", sa.Text(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("first_seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("last_seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("records_in_other", sa.BigInteger(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("server", "target", "draft_version", "method", name="uq_streams_key"),
    )
    op.create_table(
        "detector_states",
        sa.Column("stream_id", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.LargeBinary(), nullable=False),
        sa.Column("summary", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["stream_id"], ["streams.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("stream_id"),
    )
    op.create_table(
        "incidents",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("stream_id", sa.BigInteger(), nullable=False),
        sa.Column("direction", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("severity", sa.Text(), nullable=False),
        sa.Column("opened_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("opened_seq", sa.BigInteger(), nullable=False),
        sa.Column("change_point_seq", sa.BigInteger(), nullable=False),
        sa.Column("change_point_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("interval_start_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("interval_end_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("acceptance_before", sa.Double(), nullable=False),
        sa.Column("acceptance_after", sa.Double(), nullable=False),
        sa.Column("tokens_per_second_before", sa.Double(), nullable=True),
        sa.Column("tokens_per_second_after", sa.Double(), nullable=True),
        sa.Column("segments", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("evidence", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("resolved_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("resolution", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["stream_id"], ["streams.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_incidents_opened_at", "incidents", ["opened_at"], unique=False)
    op.create_index(
        "uq_incidents_one_open_per_direction",
        "incidents",
        ["stream_id", "direction"],
        unique=True,
        postgresql_where="state <> 'resolved'",
    )
    op.create_table(
        "segments",
        sa.Column("stream_id", sa.BigInteger(), nullable=False),
        sa.Column("segment", sa.Text(), nullable=False),
        sa.Column("first_seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["stream_id"], ["streams.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("stream_id", "segment"),
    )
    op.create_table(
        "incident_transitions",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("incident_id", sa.Uuid(), nullable=False),
        sa.Column("from_state", sa.Text(), nullable=True),
        sa.Column("to_state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["incident_id"], ["incidents.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index(
        op.f("ix_incident_transitions_incident_id"), "incident_transitions", ["incident_id"], unique=False
    )
    op.create_table(
        "notifications",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("incident_id", sa.Uuid(), nullable=False),
        sa.Column("destination", sa.Text(), nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("delivered_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("attempts", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["incident_id"], ["incidents.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("incident_id", "destination", "event", name="uq_notifications_once"),
    )
    op.create_table(
        "retrain_runs",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("server", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("incident_id", sa.Uuid(), nullable=True),
        sa.Column("trigger", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("parent_version", sa.Text(), nullable=True),
        sa.Column("candidate_version", sa.Text(), nullable=True),
        sa.Column("progress", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("numbers", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.ForeignKeyConstraint(["incident_id"], ["incidents.id"], ondelete="SET NULL"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_retrain_runs_started_at", "retrain_runs", ["started_at"], unique=False)
    op.create_table(
        "drafts",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("server", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("directory", sa.Text(), nullable=True),
        sa.Column("parent_version", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("promoted_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("retired_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("retrain_run_id", sa.Uuid(), nullable=True),
        sa.ForeignKeyConstraint(["retrain_run_id"], ["retrain_runs.id"], ondelete="SET NULL"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("server", "target", "version", name="uq_drafts_version"),
    )
    create_procrastinate_schema()


def create_procrastinate_schema() -> None:
    # By the driver itself: one string holds many statements, and percent signs that are not parameters. A
    # release of procrastinate that changes its schema needs a migration that runs its own SQL files.
    connection = op.get_bind().connection.driver_connection
    connection.execute(SchemaManager.get_schema())
