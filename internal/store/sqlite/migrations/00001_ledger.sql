-- Times are microseconds since 1970 in UTC. Every list is ordered by seq, the
-- order of recording, because clocks jump. The CHECKs repeat what the code
-- refuses already: no unknown kind or state is ever stored. The columns named
-- live count live processes, those of workspaces also what is kept of each;
-- triggers keep them, because every open asks for them and counting thousands of
-- rows each time would be what an open mostly costs.

-- +goose Up
CREATE TABLE instance (
    one        INTEGER PRIMARY KEY CHECK (one = 1),
    id         TEXT    NOT NULL,
    generation INTEGER NOT NULL,
    version    TEXT    NOT NULL -- of the program that wrote last
) STRICT;

CREATE TABLE workspaces (
    name       TEXT    PRIMARY KEY,
    created    INTEGER NOT NULL,
    live       INTEGER NOT NULL DEFAULT 0 CHECK (live >= 0),
    open_runs  INTEGER NOT NULL DEFAULT 0 CHECK (open_runs >= 0),
    runs       INTEGER NOT NULL DEFAULT 0 CHECK (runs >= 0),
    processes  INTEGER NOT NULL DEFAULT 0 CHECK (processes >= 0),
    spec_bytes INTEGER NOT NULL DEFAULT 0 CHECK (spec_bytes >= 0)
) STRICT, WITHOUT ROWID;

CREATE TABLE keys (
    seq       INTEGER PRIMARY KEY,
    id        TEXT    NOT NULL UNIQUE,
    kind      TEXT    NOT NULL CHECK (kind IN ('admin', 'workspace')),
    workspace TEXT    NOT NULL CHECK ((kind = 'admin') = (workspace = '')),
    name      TEXT    NOT NULL,
    hash      BLOB    NOT NULL CHECK (length(hash) = 32),
    created   INTEGER NOT NULL,
    revoked   INTEGER
) STRICT;
CREATE INDEX keys_workspace ON keys (workspace, seq);

CREATE TABLE targets (
    name       TEXT    PRIMARY KEY,
    kind       TEXT    NOT NULL CHECK (kind IN ('box', 'ssh', 'daemon')),
    generation INTEGER NOT NULL CHECK (generation > 0),
    enabled    INTEGER NOT NULL CHECK (enabled IN (0, 1)),
    max_boxes  INTEGER NOT NULL,
    host_id    TEXT    NOT NULL,
    boot_id    TEXT    NOT NULL,
    live       INTEGER NOT NULL DEFAULT 0 CHECK (live >= 0)
) STRICT, WITHOUT ROWID;

CREATE TABLE boxes (
    seq       INTEGER PRIMARY KEY,
    id        TEXT    NOT NULL UNIQUE,
    workspace TEXT    NOT NULL REFERENCES workspaces (name),
    key       TEXT    NOT NULL,
    target    TEXT    NOT NULL REFERENCES targets (name),
    state     TEXT    NOT NULL CHECK (state IN ('creating', 'ready', 'removing')),
    image     TEXT    NOT NULL,
    limits    TEXT    NOT NULL,
    mounts    TEXT    NOT NULL,
    idle_ms   INTEGER NOT NULL,
    created   INTEGER NOT NULL,
    used      INTEGER NOT NULL
) STRICT;
CREATE UNIQUE INDEX boxes_key ON boxes (workspace, key) WHERE key <> '';
CREATE INDEX boxes_workspace ON boxes (workspace, seq);
CREATE INDEX boxes_target ON boxes (target);

CREATE TABLE runs (
    seq        INTEGER PRIMARY KEY,
    id         TEXT    NOT NULL UNIQUE,
    workspace  TEXT    NOT NULL REFERENCES workspaces (name),
    box        TEXT    NOT NULL, -- outlives the box's own record
    target     TEXT    NOT NULL REFERENCES targets (name),
    state      TEXT    NOT NULL CHECK (state IN ('active', 'finishing', 'finished')),
    token_hash BLOB    NOT NULL CHECK (length(token_hash) = 32),
    exclusive  INTEGER NOT NULL CHECK (exclusive IN (0, 1)),
    auto_finish INTEGER NOT NULL CHECK (auto_finish IN (0, 1)),
    created    INTEGER NOT NULL,
    expires    INTEGER NOT NULL,
    finished   INTEGER CHECK ((state = 'finished') = (finished IS NOT NULL)),
    live       INTEGER NOT NULL DEFAULT 0 CHECK (live >= 0)
) STRICT;
CREATE INDEX runs_workspace ON runs (workspace, seq);
CREATE INDEX runs_open ON runs (box) WHERE state <> 'finished';
CREATE INDEX runs_finished ON runs (finished) WHERE finished IS NOT NULL;

CREATE TABLE run_models (
    run        TEXT    NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
    provider   TEXT    NOT NULL,
    pos        INTEGER NOT NULL,
    port       INTEGER NOT NULL,
    requests   INTEGER NOT NULL,
    bytes_up   INTEGER NOT NULL,
    bytes_down INTEGER NOT NULL,
    PRIMARY KEY (run, provider)
) STRICT, WITHOUT ROWID;

CREATE TABLE processes (
    seq         INTEGER PRIMARY KEY,
    handle      TEXT    NOT NULL UNIQUE,
    request_id  TEXT    NOT NULL,
    digest      BLOB    NOT NULL CHECK (length(digest) = 32),
    workspace   TEXT    NOT NULL,
    run         TEXT    NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
    target      TEXT    NOT NULL,
    box         TEXT    NOT NULL,
    generation  INTEGER NOT NULL,
    host_id     TEXT    NOT NULL,
    boot_id     TEXT    NOT NULL,
    version     INTEGER NOT NULL,
    state       TEXT    NOT NULL CHECK (state IN ('requested', 'starting', 'running', 'closing', 'exited',
                                                  'unknown', 'fenced', 'closed', 'never_started')),
    live        INTEGER NOT NULL CHECK (live = (state NOT IN ('fenced', 'closed', 'never_started'))),
    exit        TEXT, -- JSON api.Exit
    cleanup     TEXT    NOT NULL CHECK (cleanup IN ('pending', 'quiescent', 'unproven')),
    reason      TEXT    NOT NULL,
    close_asked INTEGER,
    grace_ms    INTEGER NOT NULL,
    fence       TEXT    NOT NULL,
    receipt     TEXT    NOT NULL,
    stdin       TEXT    NOT NULL, -- JSON api.StdinState
    log         TEXT    NOT NULL, -- JSON api.LogState
    log_gone    INTEGER NOT NULL CHECK (log_gone IN (0, 1)),
    created     INTEGER NOT NULL,
    started     INTEGER,
    exited      INTEGER,
    closed      INTEGER,
    spec        BLOB    NOT NULL, -- JSON wire.ProcSpec
    UNIQUE (run, request_id)
) STRICT;
CREATE INDEX processes_workspace ON processes (workspace, seq);
CREATE INDEX processes_live ON processes (workspace, box) WHERE live = 1;
CREATE INDEX processes_live_order ON processes (live) WHERE live = 1; -- and by seq, as every index
CREATE INDEX processes_closing ON processes (workspace, box) WHERE state = 'closing';
CREATE INDEX processes_kept ON processes (closed) WHERE log_gone = 0 AND closed IS NOT NULL;

-- +goose StatementBegin
CREATE TRIGGER processes_added AFTER INSERT ON processes BEGIN
    UPDATE workspaces SET live = live + new.live, processes = processes + 1, spec_bytes = spec_bytes + length(new.spec) WHERE name = new.workspace;
    UPDATE targets SET live = live + 1 WHERE new.live = 1 AND name = new.target;
    UPDATE runs SET live = live + 1 WHERE new.live = 1 AND id = new.run;
END;
-- +goose StatementEnd
-- +goose StatementBegin
CREATE TRIGGER processes_changed AFTER UPDATE OF live ON processes WHEN new.live <> old.live BEGIN
    UPDATE targets SET live = live + new.live - old.live WHERE name = new.target;
    UPDATE workspaces SET live = live + new.live - old.live WHERE name = new.workspace;
    UPDATE runs SET live = live + new.live - old.live WHERE id = new.run;
END;
-- +goose StatementEnd
-- +goose StatementBegin
CREATE TRIGGER processes_removed AFTER DELETE ON processes BEGIN
    UPDATE workspaces SET live = live - old.live, processes = processes - 1, spec_bytes = spec_bytes - length(old.spec) WHERE name = old.workspace;
    UPDATE targets SET live = live - 1 WHERE old.live = 1 AND name = old.target;
    UPDATE runs SET live = live - 1 WHERE old.live = 1 AND id = old.run;
END;
-- +goose StatementEnd
-- +goose StatementBegin
CREATE TRIGGER runs_added AFTER INSERT ON runs BEGIN
    UPDATE workspaces SET runs = runs + 1, open_runs = open_runs + (new.state <> 'finished') WHERE name = new.workspace;
END;
-- +goose StatementEnd
-- +goose StatementBegin
CREATE TRIGGER runs_changed AFTER UPDATE OF state ON runs WHEN (new.state = 'finished') <> (old.state = 'finished') BEGIN
    UPDATE workspaces SET open_runs = open_runs + (new.state <> 'finished') - (old.state <> 'finished') WHERE name = new.workspace;
END;
-- +goose StatementEnd
-- +goose StatementBegin
CREATE TRIGGER runs_removed AFTER DELETE ON runs BEGIN
    UPDATE workspaces SET runs = runs - 1, open_runs = open_runs - (old.state <> 'finished') WHERE name = old.workspace;
END;
-- +goose StatementEnd

CREATE TABLE receipts (
    id      TEXT    PRIMARY KEY,
    handle  TEXT    NOT NULL UNIQUE REFERENCES processes (handle) ON DELETE CASCADE,
    created INTEGER NOT NULL,
    body    BLOB    NOT NULL -- JSON api.Receipt
) STRICT, WITHOUT ROWID;

CREATE TABLE fences (
    seq          INTEGER PRIMARY KEY,
    id           TEXT    NOT NULL UNIQUE,
    workspace    TEXT    NOT NULL,
    target       TEXT    NOT NULL,
    box          TEXT    NOT NULL, -- '' covers the whole target
    handle       TEXT    NOT NULL, -- outlives the process's own record
    run          TEXT    NOT NULL,
    reason       TEXT    NOT NULL,
    evidence     TEXT    NOT NULL,
    created      INTEGER NOT NULL,
    cleared      INTEGER,
    cleared_by   TEXT    NOT NULL,
    clear_reason TEXT    NOT NULL
) STRICT;
CREATE INDEX fences_workspace ON fences (workspace, seq);
CREATE INDEX fences_standing ON fences (target, box) WHERE cleared IS NULL;
CREATE INDEX fences_run ON fences (run);

CREATE TABLE audit (
    seq       INTEGER PRIMARY KEY,
    id        TEXT    NOT NULL UNIQUE,
    at        INTEGER NOT NULL,
    actor     TEXT    NOT NULL,
    workspace TEXT    NOT NULL,
    action    TEXT    NOT NULL,
    object    TEXT    NOT NULL,
    detail    TEXT    NOT NULL
) STRICT;
CREATE INDEX audit_workspace ON audit (workspace, seq);
CREATE INDEX audit_at ON audit (at);
