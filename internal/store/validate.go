package store

import (
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/ident"
)

// Bounds of what a record may hold. They are far above what the parts in front
// of the ledger let through: they are the last fence, not the first.
const (
	MaxText   = 4096         // bytes of any single text
	MaxSpec   = 4 << 20      // bytes of Process.Spec
	MaxDetail = 64           // entries of a detail or evidence map
	MaxItems  = 256          // mounts of a box, model grants of a run, audit events of a change
	maxTime   = 253402300800 // seconds; the year 10000, beyond which RFC 3339 has no form
)

// checker collects the first thing that is wrong with a record.
type checker struct {
	what string
	err  error
}

func (c *checker) fail(format string, args ...any) {
	if c.err == nil {
		c.err = errdefs.New(errdefs.Invalid, "the record of a "+c.what+" is not valid: "+format, args...)
	}
}

// id requires a text that is there, id-like or not: their form is package
// ident's business.
func (c *checker) id(field, s string) {
	if s == "" {
		c.fail("%s is empty", field)
	}
	c.text(field, s)
}

func (c *checker) text(field, s string) {
	if len(s) > MaxText {
		c.fail("%s has %d bytes, the limit is %d", field, len(s), MaxText)
	}
}

func (c *checker) texts(field string, m map[string]string) {
	if len(m) > MaxDetail {
		c.fail("%s has %d entries, the limit is %d", field, len(m), MaxDetail)
	}
	for k, v := range m {
		c.text(field, k)
		c.text(field, v)
	}
}

func (c *checker) time(field string, t time.Time) {
	if t.IsZero() {
		c.fail("%s is not set", field)
	}
	c.maybe(field, &t)
}

func (c *checker) maybe(field string, t *time.Time) {
	if t != nil && (t.Unix() < -62135596800 || t.Unix() >= maxTime) {
		c.fail("%s is outside the years 1 to 9999", field)
	}
}

func (c *checker) count(field string, n int64) {
	if n < 0 || n > api.MaxOffset {
		c.fail("%s is %d, the limits are 0 and 2^53", field, n)
	}
}

func oneOf[T comparable](c *checker, field string, v T, known ...T) {
	for _, k := range known {
		if v == k {
			return
		}
	}
	c.fail("%s %v is not known", field, v)
}

// Validate returns invalid if the record must not be stored.
func (w Workspace) Validate() error {
	c := &checker{what: "workspace"}
	c.id("name", w.Name)
	c.time("created", w.Created)
	return c.err
}

// Validate returns invalid if the record must not be stored.
func (k Key) Validate() error {
	c := &checker{what: "key"}
	c.id("id", k.ID)
	oneOf(c, "kind", k.Kind, KeyAdmin, KeyWorkspace)
	if (k.Kind == KeyAdmin) != (k.Workspace == "") {
		c.fail("a workspace key has a workspace and an admin key has none")
	}
	c.text("workspace", k.Workspace)
	c.text("name", k.Name)
	if k.Hash == ([32]byte{}) {
		c.fail("it has no hash")
	}
	c.time("created", k.Created)
	c.maybe("revoked", k.Revoked)
	return c.err
}

// Validate returns invalid if the record must not be stored.
func (t Target) Validate() error {
	c := &checker{what: "target"}
	c.id("name", t.Name)
	oneOf(c, "kind", t.Kind, "box", "ssh", "daemon")
	c.count("generation", t.Generation)
	c.count("max boxes", int64(t.MaxBoxes))
	c.text("host id", t.HostID)
	c.text("boot id", t.BootID)
	return c.err
}

// Validate returns invalid if the record must not be stored.
func (b Box) Validate() error {
	c := &checker{what: "box"}
	c.id("id", b.ID)
	c.id("workspace", b.Workspace)
	c.text("key", b.Key)
	c.id("target", b.Target)
	c.boxState(b.State)
	c.text("image", b.Image)
	c.count("cpu_millis", b.Limits.CPUMillis)
	c.count("memory_bytes", b.Limits.MemoryBytes)
	c.count("pids", b.Limits.Pids)
	if len(b.Mounts) > MaxItems {
		c.fail("it has %d mounts, the limit is %d", len(b.Mounts), MaxItems)
	}
	for _, m := range b.Mounts {
		c.id("mount source", m.Source)
		c.id("mount dest", m.Dest)
	}
	c.count("idle_ms", b.IdleMillis)
	c.time("created", b.Created)
	c.time("used", b.Used)
	return c.err
}

func (c *checker) boxState(s api.BoxState) {
	oneOf(c, "state", s, api.BoxCreating, api.BoxReady, api.BoxRemoving)
}

// ValidateBoxState returns invalid for a state that is not known.
func ValidateBoxState(s api.BoxState) error {
	c := &checker{what: "box"}
	c.boxState(s)
	return c.err
}

// Validate returns invalid if the record must not be stored.
func (r Run) Validate() error {
	c := &checker{what: "run"}
	c.id("id", r.ID)
	c.id("workspace", r.Workspace)
	c.id("box", r.Box)
	c.id("target", r.Target)
	c.runState(r.State)
	if (r.State == api.RunFinished) != (r.Finished != nil) {
		c.fail("a finished run has the time it finished, and no other run has")
	}
	if r.TokenHash == ([32]byte{}) {
		c.fail("it has no token hash")
	}
	if i := r.Installation; i != nil {
		for _, id := range []struct{ name, text string }{
			{"instance_uuid", i.InstanceUUID}, {"workspace_uuid", i.WorkspaceUUID}, {"installation_uuid", i.InstallationUUID},
		} {
			if id.text == "" || len(id.text) > maxForeignID || !printable(id.text) {
				c.fail("the installation's %s is empty, longer than %d bytes, or has characters that cannot be printed", id.name, maxForeignID)
			}
		}
		if i.PlacementGeneration < 1 || i.RuntimeRevision < 1 {
			c.fail("the installation's generation and revision are 1 or more")
		}
		if !ident.IsDigest(i.ArtifactDigest) {
			c.fail("the installation's artifact_digest is not 64 lower-case hexadecimal digits")
		}
	}
	if len(r.Models) > MaxItems {
		c.fail("it has %d model grants, the limit is %d", len(r.Models), MaxItems)
	}
	seen := map[string]bool{}
	for _, m := range r.Models {
		c.id("model provider", m.Provider)
		if seen[m.Provider] {
			c.fail("the model provider %q is named twice", m.Provider)
		}
		seen[m.Provider] = true
		if m.Port < 0 || m.Port > 65535 {
			c.fail("port %d is none", m.Port)
		}
		c.count("requests", m.Requests)
		c.count("bytes up", m.BytesUp)
		c.count("bytes down", m.BytesDown)
	}
	c.time("created", r.Created)
	c.time("expires", r.Expires)
	c.maybe("finished", r.Finished)
	return c.err
}

func (c *checker) runState(s api.RunState) {
	oneOf(c, "state", s, api.RunActive, api.RunFinishing, api.RunFinished)
}

// ValidateRunState returns invalid for a state that is not known.
func ValidateRunState(s api.RunState) error {
	c := &checker{what: "run"}
	c.runState(s)
	return c.err
}

// Validate returns invalid if the record must not be stored.
func (p *Process) Validate() error {
	c := &checker{what: "process"}
	c.id("handle", p.Handle)
	c.id("request id", p.RequestID)
	c.id("workspace", p.Workspace)
	c.id("run", p.Run)
	c.id("target", p.Target)
	c.id("box", p.Box)
	c.count("generation", p.Generation)
	c.text("host id", p.HostID)
	c.text("boot id", p.BootID)
	c.count("version", p.Version)
	oneOf(c, "state", p.State, api.StateRequested, api.StateStarting, api.StateRunning, api.StateClosing, api.StateExited,
		api.StateUnknown, api.StateFenced, api.StateClosed, api.StateNeverStarted)
	if len(p.Spec) > MaxSpec {
		c.fail("its spec has %d bytes, the limit is %d", len(p.Spec), MaxSpec)
	}
	if p.Exit != nil {
		oneOf(c, "exit kind", p.Exit.Kind, api.ExitExited, api.ExitSignalled, api.ExitOOM, api.ExitDeadline, api.ExitSpawnFailed, api.ExitUnknown)
		if (p.Exit.Kind == api.ExitExited) != (p.Exit.Code != nil) {
			c.fail("an exit code belongs to the exit kind exited and to no other")
		}
		c.text("exit signal", p.Exit.Signal)
		c.text("exit detail", p.Exit.Detail)
	}
	oneOf(c, "cleanup", p.Cleanup, api.CleanupPending, api.CleanupQuiescent, api.CleanupUnproven)
	c.text("reason", p.Reason)
	c.count("grace_ms", p.GraceMillis)
	c.text("fence", p.Fence)
	c.text("receipt", p.Receipt)
	c.count("stdin accepted", p.Stdin.Accepted)
	c.count("stdin window", p.Stdin.Window)
	c.count("log oldest", p.Log.Oldest)
	c.count("log next", p.Log.Next)
	c.count("log stdout", p.Log.Stdout)
	c.count("log stderr", p.Log.Stderr)
	c.text("log failure", p.Log.Failure)
	c.time("created", p.Created)
	c.maybe("close asked", p.CloseAsked)
	c.maybe("started", p.Started)
	c.maybe("exited", p.Exited)
	c.maybe("closed", p.Closed)
	return c.err
}

// Validate returns invalid if the record must not be raised.
func (f *Fence) Validate() error {
	c := &checker{what: "fence"}
	c.id("id", f.ID)
	c.id("workspace", f.Workspace)
	c.id("target", f.Target)
	c.text("box", f.Box)
	c.id("handle", f.Handle)
	c.id("reason", f.Reason)
	c.texts("evidence", f.Evidence)
	c.time("created", f.Created)
	if f.Cleared != nil || f.ClearedBy != "" || f.ClearReason != "" {
		c.fail("it is lifted already")
	}
	return c.err
}

// Validate returns invalid if the record must not be stored.
func (r *Receipt) Validate() error {
	c := &checker{what: "receipt"}
	c.id("id", r.ID)
	c.id("handle", r.Handle)
	c.time("created", r.Created)
	if r.Body.ID != r.ID || r.Body.Handle != r.Handle {
		c.fail("its body is that of another receipt")
	}
	oneOf(c, "method", r.Body.Method, "pid_namespace", "cgroup", "reboot", "never_started")
	if len(r.Body.Payload) == 0 || len(r.Body.Payload) > MaxSpec || len(r.Body.Signature) == 0 || len(r.Body.PublicKey) == 0 {
		c.fail("it is not signed")
	}
	return c.err
}

// Validate returns invalid if the record must not be stored.
func (a AuditEvent) Validate() error {
	c := &checker{what: "audit event"}
	c.id("id", a.ID)
	c.time("time", a.At)
	c.id("actor", a.Actor)
	c.text("workspace", a.Workspace)
	c.id("action", a.Action)
	c.text("object", a.Object)
	c.texts("detail", a.Detail)
	return c.err
}

// Validate returns invalid if the change must not be made to p.
func (ch Change) Validate(p *Process) error {
	c := &checker{what: "change"}
	if len(ch.Audit) > MaxItems {
		c.fail("it has %d audit events, the limit is %d", len(ch.Audit), MaxItems)
	}
	for _, a := range ch.Audit {
		if err := a.Validate(); err != nil {
			return err
		}
	}
	if f := ch.Fence; f != nil {
		if err := f.Validate(); err != nil {
			return err
		}
		if f.Handle != p.Handle || f.Workspace != p.Workspace || f.Target != p.Target || f.Box != "" && f.Box != p.Box {
			c.fail("its fence is not about the process %s", p.Handle)
		}
	}
	if cl := ch.ClearFence; cl != nil {
		c.id("id of the fence to lift", cl.ID)
		c.id("who lifts it", cl.By)
		c.id("why it is lifted", cl.Reason)
		c.time("when it is lifted", cl.At)
	}
	if r := ch.Receipt; r != nil {
		if err := r.Validate(); err != nil {
			return err
		}
		if r.Handle != p.Handle {
			c.fail("its receipt is that of another process than %s", p.Handle)
		}
	}
	return c.err
}

// Validate returns invalid if the page cannot be given.
func (p Page) Validate() error {
	if p.Limit < 1 || p.Limit > MaxPage {
		return errdefs.New(errdefs.Invalid, "a page of %d records was asked for, the limits are 1 and %d", p.Limit, MaxPage)
	}
	return nil
}

// maxForeignID bounds identifiers that other systems made, in bytes.
const maxForeignID = 128

func printable(s string) bool {
	for i := range len(s) {
		if s[i] < 0x21 || s[i] > 0x7e {
			return false
		}
	}
	return true
}
