// Package dispatch owns the use of the relay: it says who may hand jobs to
// daemons, speaks the API's shapes, and keeps the operator's acts in the audit
// record. The jobs themselves belong to the hub (package relay).
//
// The relay of a server belongs to one workspace, which its operator names. For
// the keys of every other workspace it does not exist: they are answered exactly
// as by a server that has none (P6).
package dispatch

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/relay"
	"github.com/stockade-run/stockade/internal/secret"
	"github.com/stockade-run/stockade/internal/store"
)

// Hub is what the service needs of *relay.Hub.
type Hub interface {
	WaitForDaemon(ctx context.Context, id string, timeout time.Duration) error
	RunJob(ctx context.Context, req relay.JobRequest) (*relay.Job, error)
	CancelJob(ctx context.Context, jobID, cause string) (relay.Outcome, error)
	Daemons() []relay.DaemonInfo
	Jobs() []relay.JobInfo
	Fences() []relay.Fence
	ClearFence(ctx context.Context, seen relay.Fence, operator, reason string) (relay.Fence, error)
}

// Ledger keeps acts. store.Store is one.
type Ledger interface {
	AppendAudit(ctx context.Context, a store.AuditEvent) error
}

// Config is what a service is made of.
type Config struct {
	Hub Hub // required
	// Workspace is whose keys may use the relay.
	Workspace string
	// MaxPayload is the hub's limit of one message in bytes.
	MaxPayload int64
	// Ledger gets the operator's acts, before they have effect. nil leaves it to the
	// hub's own audit log.
	Ledger Ledger
	// Logger gets who did what; nil discards it.
	Logger *slog.Logger
	// ToolSets are the MCP servers whose tools a job may be granted, by name.
	ToolSets map[string]ToolSet
}

// Service answers for one relay. It may be used from many goroutines; its own end
// the sessions with tool sets of jobs that were left, and [Service.Close] joins them.
type Service struct {
	cfg Config
	log *slog.Logger

	clearing sync.Mutex // held by ClearFence

	mu     sync.Mutex
	closed bool
	jobs   sync.WaitGroup // until their sessions are ended
}

// New returns a service.
func New(cfg Config) *Service {
	log := cfg.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Service{cfg: cfg, log: log}
}

// Close refuses new jobs and returns when those there are were left and their sessions
// with tool sets are ended, which takes 5 s at most after the last was left. The hub
// must have been stopped: else nobody leaves. Closing twice is harmless.
func (s *Service) Close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.jobs.Wait()
}

// enter counts a job.
func (s *Service) enter() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return errdefs.New(errdefs.Unavailable, "the relay is shutting down")
	}
	s.jobs.Add(1)
	return nil
}

// MaxPayload is the largest payload in bytes.
func (s *Service) MaxPayload() int64 { return s.cfg.MaxPayload }

// ErrNone is what a server without a relay answers, and one with a relay that is
// not the caller's.
func ErrNone() *errdefs.Error {
	return errdefs.New(errdefs.NotFound, "there is no relay here").
		WithNext("an operator starts one with --relay-listen and names its workspace with --relay-workspace")
}

// check says whether p may do the action on this relay.
func (s *Service) check(p authz.Principal, a authz.Action) error {
	if err := authz.Check(p, a); err != nil {
		return err
	}
	if !p.Scope().All && p.Workspace != s.cfg.Workspace {
		return ErrNone()
	}
	return nil
}

// Job is a job on its way, owned by whoever called Run. It must be left.
type Job struct {
	job  *relay.Job
	info api.RelayJob
	stop context.CancelFunc
}

// Run waits for the daemon if it is asked to, and hands it the job. ctx bounds the
// waiting only: the job ends by itself, at its time-out, by Cancel, or by Leave.
func (s *Service) Run(ctx context.Context, p authz.Principal, req api.RelayJobRequest) (*Job, error) {
	if err := s.check(p, authz.RelayJobRun); err != nil {
		return nil, err
	}
	switch {
	case len(req.Tools) > 1:
		return nil, errdefs.New(errdefs.Invalid, "%d tool sets are named, a job is granted one at most", len(req.Tools))
	case req.TimeoutMillis < 0 || req.TimeoutMillis > 0 && req.TimeoutMillis < 10 || req.TimeoutMillis > 30*24*3600*1000:
		return nil, errdefs.New(errdefs.Invalid, "timeout_ms is %d, allowed is 10 to 2592000000, or 0 for the relay's default", req.TimeoutMillis)
	case req.WaitMillis < 0 || req.WaitMillis > 600000:
		return nil, errdefs.New(errdefs.Invalid, "wait_ms is %d, allowed is 0 to 600000", req.WaitMillis)
	}
	tools, end, err := s.tools(req.Tools)
	if err != nil {
		return nil, err
	}
	if req.WaitMillis > 0 {
		if err := s.cfg.Hub.WaitForDaemon(ctx, req.DaemonID, time.Duration(req.WaitMillis)*time.Millisecond); err != nil {
			return nil, err
		}
	}
	if err := ctx.Err(); err != nil { // whoever asked is gone: nothing was sent, nothing is fenced
		return nil, errdefs.Wrap(err, errdefs.Unavailable, "the request was given up before the job was sent")
	}
	if err := s.enter(); err != nil {
		return nil, err
	}
	// The hub settles a job whose context ends; Leave says why first.
	root, stop := context.WithCancel(context.WithoutCancel(ctx))
	job, err := s.cfg.Hub.RunJob(root, relay.JobRequest{
		DaemonID: req.DaemonID, Payload: req.Payload,
		Timeout: time.Duration(req.TimeoutMillis) * time.Millisecond, Tools: tools,
	})
	if err != nil {
		stop()
		s.jobs.Done()
		return nil, err
	}
	context.AfterFunc(root, func() { // the job is left, and its tools were revoked
		defer s.jobs.Done()
		end()
	})
	j := &Job{job: job, stop: stop, info: api.RelayJob{ID: job.ID(), DaemonID: req.DaemonID, State: "starting", StartedAt: time.Now().UTC()}}
	for _, i := range s.cfg.Hub.Jobs() { // it may have ended already
		if i.ID == j.info.ID {
			j.info = jobOf(i)
		}
	}
	s.log.Debug("relay job", "job", j.info.ID, "daemon", req.DaemonID, "by", p.String())
	return j, nil
}

// tools is what a job is granted, and how that ends. A name the operator has not
// registered is invalid (authority is derived: a caller names no address).
func (s *Service) tools(names []string) (granted relay.Tools, end func(), err error) {
	if len(names) == 0 {
		return noTools{}, func() {}, nil
	}
	set, ok := s.cfg.ToolSets[names[0]]
	if !ok {
		next := "leave tools out: the operator has registered none (setting relay.tools)"
		if have := slices.Sorted(maps.Keys(s.cfg.ToolSets)); len(have) > 0 {
			next = "there are: " + strings.Join(have, ", ")
		}
		return nil, nil, errdefs.New(errdefs.Invalid, "there is no tool set %q", names[0]).WithNext("%s", next)
	}
	g := newGrant(names[0], set, s.log)
	return g, g.end, nil
}

// Info is the job as it started.
func (j *Job) Info() api.RelayJob { return j.info }

// NextBatch returns the events that are there, at least one; they may be kept.
// io.EOF says that the job ended and is settled, also when it ended badly: Leave
// says how. ctx ends the waiting only, and then its cause is the error.
func (j *Job) NextBatch(ctx context.Context) ([]json.RawMessage, error) {
	events, err := j.job.NextBatch(ctx)
	if err == nil || ctx.Err() != nil && errors.Is(err, context.Cause(ctx)) {
		return events, err
	}
	if j.over() {
		return nil, io.EOF
	}
	return nil, err
}

func (j *Job) over() bool {
	select {
	case <-j.job.Done():
		return true
	default:
		return false
	}
}

// Leave settles the job if it is not settled, and says how it ended. It takes at
// most the relay's cancel time, whatever becomes of ctx. Calling it again answers
// the same.
func (j *Job) Leave(ctx context.Context, cause string) (api.RelayOutcome, error) {
	defer j.stop()
	o, err := j.job.Cancel(context.WithoutCancel(ctx), cause)
	if err != nil {
		return api.RelayOutcome{}, err
	}
	return outcomeOf(o), nil
}

// Cancel settles a job by its id.
func (s *Service) Cancel(ctx context.Context, p authz.Principal, id string) (api.RelayOutcome, error) {
	if err := s.check(p, authz.RelayJobCancel); err != nil {
		return api.RelayOutcome{}, err
	}
	o, err := s.cfg.Hub.CancelJob(context.WithoutCancel(ctx), id, "cancelled by "+p.String())
	if err != nil {
		return api.RelayOutcome{}, err
	}
	s.log.Info("relay job cancelled", "job", id, "by", p.String(), "acknowledged", o.Acknowledged)
	return outcomeOf(o), nil
}

// Daemons lists the connected daemons by id.
func (s *Service) Daemons(_ context.Context, p authz.Principal) (api.List[api.RelayDaemon], error) {
	if err := s.check(p, authz.RelayDaemonRead); err != nil {
		return api.List[api.RelayDaemon]{}, err
	}
	l := api.List[api.RelayDaemon]{Items: []api.RelayDaemon{}}
	for _, d := range s.cfg.Hub.Daemons() {
		l.Items = append(l.Items, daemonOf(d))
	}
	return l, nil
}

// Jobs lists the jobs that are not settled, oldest first.
func (s *Service) Jobs(_ context.Context, p authz.Principal) (api.List[api.RelayJob], error) {
	if err := s.check(p, authz.RelayJobRead); err != nil {
		return api.List[api.RelayJob]{}, err
	}
	l := api.List[api.RelayJob]{Items: []api.RelayJob{}}
	for _, j := range s.cfg.Hub.Jobs() {
		l.Items = append(l.Items, jobOf(j))
	}
	return l, nil
}

// Fences lists the fences that stand, oldest first.
func (s *Service) Fences(_ context.Context, p authz.Principal) (api.List[api.RelayFence], error) {
	if err := s.check(p, authz.RelayFenceRead); err != nil {
		return api.List[api.RelayFence]{}, err
	}
	l := api.List[api.RelayFence]{Items: []api.RelayFence{}}
	for _, f := range s.cfg.Hub.Fences() {
		l.Items = append(l.Items, fenceOf(f))
	}
	return l, nil
}

// Fence returns the fence of a daemon id, or of a fence's key.
func (s *Service) Fence(_ context.Context, p authz.Principal, id string) (api.RelayFence, error) {
	if err := s.check(p, authz.RelayFenceRead); err != nil {
		return api.RelayFence{}, err
	}
	f, err := s.fence(id)
	if err != nil {
		return api.RelayFence{}, err
	}
	return fenceOf(f), nil
}

func (s *Service) fence(id string) (relay.Fence, error) {
	for _, f := range s.cfg.Hub.Fences() {
		if id != "" && (f.DaemonID == id || f.Key == id) {
			return f, nil
		}
	}
	return relay.Fence{}, errdefs.New(errdefs.NotFound, "no fence stands for the daemon %q", id).
		WithNext("stockade relay fence ls lists those that stand")
}

// ClearFence lifts a fence: an operator's statement that nothing runs there any
// more. The statement is in the audit record before the fence is lifted, so what
// was lifted was always stated; a statement alone has lifted nothing. A fence other
// than the one that was looked at is a conflict error.
func (s *Service) ClearFence(ctx context.Context, p authz.Principal, id string, req api.ClearRelayFenceRequest) (api.RelayFence, error) {
	if err := s.check(p, authz.RelayFenceClear); err != nil {
		return api.RelayFence{}, err
	}
	req.Reason = strings.TrimSpace(req.Reason) // space is no reason
	if len(req.Reason) < 8 || len(req.Reason) > 1024 {
		return api.RelayFence{}, errdefs.New(errdefs.Invalid, "the reason has %d bytes, allowed is 8 to 1024", len(req.Reason)).
			WithNext("say what you checked")
	}
	// One at a time, so that what is stated and what is lifted are the same fence.
	s.clearing.Lock()
	defer s.clearing.Unlock()
	f, err := s.fence(id)
	if err != nil {
		return api.RelayFence{}, err
	}
	if f.ID() != req.Fence {
		return api.RelayFence{}, relay.ErrOtherFence(f.DaemonID)
	}
	if s.cfg.Ledger != nil {
		err := s.cfg.Ledger.AppendAudit(ctx, store.AuditEvent{
			ID: secret.ID(ident.Audit), At: time.Now(), Actor: p.String(), Workspace: s.cfg.Workspace,
			Action: string(authz.RelayFenceClear), Object: f.Key,
			Detail: map[string]string{"daemon": f.DaemonID, "fence": f.Code, "since": f.Since.UTC().Format(time.RFC3339), "reason": req.Reason},
		})
		if err != nil {
			return api.RelayFence{}, err
		}
	}
	if f, err = s.cfg.Hub.ClearFence(ctx, f, p.String(), req.Reason); err != nil {
		return api.RelayFence{}, err
	}
	return fenceOf(f), nil
}
