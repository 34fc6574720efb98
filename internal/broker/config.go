package broker

import (
	"context"
	"log/slog"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/driver"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/gateway"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/store"
)

// Config is what a broker is made from.
type Config struct {
	// Store is the ledger. The broker does not close it.
	Store store.Store
	// Targets are the places where processes may run, at least one; the first is
	// the default.
	Targets []TargetConfig
	// Gateway opens model routes for runs; nil refuses runs that ask for models.
	Gateway Gateway
	// Signer signs receipts.
	Signer Signer
	// Limits bounds everything; zero fields get their defaults.
	Limits Limits
	// Logger gets no secret, no argument and no byte of a process; nil discards.
	Logger *slog.Logger
}

// TargetConfig registers one target.
type TargetConfig struct {
	Name     string
	Driver   driver.Driver
	MaxBoxes int // 0: 64
}

// Signer signs receipts with Ed25519 (package secret has it).
type Signer interface {
	Sign(payload []byte) []byte
	Public() []byte
}

// Gateway is what the broker needs of the model gateway; *gateway.Gateway has it.
type Gateway interface {
	// Check refuses unknown providers, opening nothing.
	Check(providers []string) error
	// Open begins to serve a run; opening an open run again returns its routes.
	Open(ctx context.Context, g gateway.Grant) ([]gateway.Route, error)
	// CloseRun ends a run's rights, calls in flight included, before it returns nil.
	CloseRun(ctx context.Context, run string) error
	// Env merges the environments of routes.
	Env(routes []gateway.Route) map[string]string
}

// Limits bounds what callers may ask for and how long the broker goes on. Zero
// fields get the default named beside them.
type Limits struct {
	// DefaultDeadline is the wall time of a process that names none (24 h);
	// MaxDeadline the most it may name (7 days).
	DefaultDeadline, MaxDeadline time.Duration
	// DefaultSpool is the log kept per process (64 MiB); MaxSpool the most it may
	// name (4 GiB). The least is 1 MiB.
	DefaultSpool, MaxSpool int64
	// Processes bounds live processes: per run (32), per workspace (512), per
	// target (10,000).
	PerRun, PerWorkspace, PerTarget int
	// RunsPerWorkspace bounds unfinished runs (1,000).
	RunsPerWorkspace int
	// Kept bounds what is recorded of one workspace, ended or not: runs (100,000),
	// processes (200,000) and bytes of their arguments and environment (1 GiB).
	KeptRuns, KeptProcesses int
	KeptSpecBytes           int64
	// KeptLogs and KeptLogBytes bound the logs of closed processes that the hosts
	// keep for one workspace (1,000 and 16 GiB, but never less than MaxSpool):
	// those longest closed are forgotten before LogRetention.
	KeptLogs     int
	KeptLogBytes int64
	// DefaultRunTTL is the life of a run that names none (24 h); MaxRunTTL the
	// most it may name (30 days).
	DefaultRunTTL, MaxRunTTL time.Duration
	// DefaultGrace is the time between SIGTERM and SIGKILL where a close names
	// none (5 s).
	DefaultGrace time.Duration
	// ProofWait is how long after the grace period a close may try to prove that
	// the tree is gone before a fence is raised (60 s).
	ProofWait time.Duration
	// OpenWait is how long an open waits for the host's word (30 s).
	OpenWait time.Duration
	// Readers bounds calls that read one log at the same time (16).
	Readers int
	// Lease is how long processes may go on without this server (30 min); it is
	// renewed every LeaseEvery (1 min).
	Lease, LeaseEvery time.Duration
	// Sweep is how often expired runs are looked for (2 s).
	Sweep time.Duration
	// LogRetention is how long the log of a closed process is kept on its host
	// (24 h), RecordRetention how long finished runs and their records are kept
	// (7 days), AuditRetention how long acts are (a year), RetentionEvery how
	// often they are applied (10 min).
	LogRetention, RecordRetention, AuditRetention, RetentionEvery time.Duration

	trimPiece int // how many logs beyond a workspace's share are looked at together
}

// What one call may carry. MaxWrite and MaxRead are one frame's payload; the
// window is the shim's.
const (
	MaxWrite    = 1 << 20
	MaxRead     = 4 << 20
	MaxWait     = 30 * time.Second
	StdinWindow = 1 << 20
	minSpool    = 1 << 20
	maxGrace    = 10 * time.Minute
)

// IOLimits is what [MaxWrite] and the others say, as callers see it.
func IOLimits() api.IOLimits {
	return api.IOLimits{MaxWriteBytes: MaxWrite, MaxReadBytes: MaxRead, MaxWaitMillis: MaxWait.Milliseconds(), StdinWindow: StdinWindow}
}

func (l Limits) withDefaults() Limits {
	span := func(d *time.Duration, def time.Duration) {
		if *d <= 0 {
			*d = def
		}
	}
	count := func(n *int, def int) {
		if *n <= 0 {
			*n = def
		}
	}
	span(&l.DefaultDeadline, 24*time.Hour)
	span(&l.MaxDeadline, 7*24*time.Hour)
	l.MaxDeadline = max(l.MaxDeadline, l.DefaultDeadline)
	if l.DefaultSpool <= 0 {
		l.DefaultSpool = 64 << 20
	}
	l.DefaultSpool = max(l.DefaultSpool, minSpool)
	if l.MaxSpool <= 0 {
		l.MaxSpool = 4 << 30
	}
	l.MaxSpool = max(l.MaxSpool, l.DefaultSpool)
	count(&l.PerRun, 32)
	count(&l.PerWorkspace, 512)
	count(&l.PerTarget, 10_000)
	count(&l.RunsPerWorkspace, 1000)
	count(&l.KeptRuns, 100_000)
	count(&l.KeptProcesses, 200_000)
	if l.KeptSpecBytes <= 0 {
		l.KeptSpecBytes = 1 << 30
	}
	count(&l.KeptLogs, 1000)
	if l.KeptLogBytes <= 0 {
		l.KeptLogBytes = 16 << 30
	}
	// A log may be longer than its cap by what was in the pipes at its end.
	l.KeptLogBytes = max(l.KeptLogBytes, l.MaxSpool+(8<<20))
	span(&l.DefaultRunTTL, 24*time.Hour)
	span(&l.MaxRunTTL, 30*24*time.Hour)
	l.MaxRunTTL = max(l.MaxRunTTL, l.DefaultRunTTL)
	span(&l.DefaultGrace, 5*time.Second)
	span(&l.ProofWait, time.Minute)
	span(&l.OpenWait, 30*time.Second)
	count(&l.Readers, 16)
	span(&l.Lease, 30*time.Minute)
	span(&l.LeaseEvery, time.Minute)
	span(&l.Sweep, 2*time.Second)
	span(&l.LogRetention, 24*time.Hour)
	span(&l.RecordRetention, 7*24*time.Hour)
	span(&l.AuditRetention, 365*24*time.Hour)
	span(&l.RetentionEvery, 10*time.Minute)
	count(&l.trimPiece, 100)
	return l
}

func (l Limits) kept() store.Kept {
	return store.Kept{Runs: l.KeptRuns, Processes: l.KeptProcesses, SpecBytes: l.KeptSpecBytes}
}

func (c Config) check() error {
	if c.Store == nil || c.Signer == nil || len(c.Targets) == 0 {
		return errdefs.New(errdefs.Internal, "a broker needs a ledger, a signer and at least one target")
	}
	seen := map[string]bool{}
	for _, t := range c.Targets {
		if err := ident.CheckName("the target's name", t.Name); err != nil {
			return err
		}
		if t.Driver == nil {
			return errdefs.New(errdefs.Internal, "target %q has no driver", t.Name)
		}
		if seen[t.Name] {
			return errdefs.New(errdefs.Invalid, "target %q is configured twice", t.Name)
		}
		seen[t.Name] = true
	}
	return nil
}
