// Package registration holds the short-lived credentials of plugin workers: the
// one-use capability that a worker started by the runtime registers with, and the
// key that a plugin's author debugs with. Both are found by their hash, so a lookup
// takes no time that depends on a secret. A capability's text is not kept; a debug
// key's is, because it is told again while it lives.
//
// Time is an argument; both tables may be used from any goroutine.
package registration

import (
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/secret"
)

// Lives of the credentials, those of the published Python runtime.
const (
	CapabilityLife = 300 * time.Second
	DebugKeyLife   = 2 * time.Hour
	// MaxDebugKeys bounds the workspaces that may debug at a time.
	MaxDebugKeys = 1024
)

// Grant is what a capability allows: to register as one plugin, once.
type Grant struct {
	Author, Name string             // the identity that the worker's manifest must have
	Binding      pluginwire.Context // of the installation; of the first slot for a pool; zero for a legacy plugin
	Pool         string             // digest of the pool; empty for a worker of its own
	Launch       uint64             // the caller's number of the launch, so that an old one cannot pass for a new one
}

type entry struct {
	grant   Grant
	expires time.Time
}

// Registrations are the capabilities that are issued and not yet used.
type Registrations struct {
	mu      sync.Mutex
	max     int
	pending map[[32]byte]entry
}

// New makes an empty table for at most max capabilities at a time.
func New(max int) *Registrations {
	return &Registrations{max: max, pending: map[[32]byte]entry{}}
}

// Issue makes a capability that lives for CapabilityLife. With max of them
// pending it is an exhausted error: "capacity reached".
func (r *Registrations) Issue(g Grant, now time.Time) (string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.prune(now)
	if len(r.pending) >= r.max {
		return "", errdefs.New(errdefs.Exhausted, "pending plugin registration capacity reached: %d", r.max).
			WithNext("wait until the workers that are starting have registered, or raise max_pending_registrations")
	}
	text := secret.Bearer()
	r.pending[secret.Hash(text)] = entry{grant: g, expires: now.Add(CapabilityLife)}
	return text, nil
}

// Pending reports whether the capability may still be used; asking does not use it.
func (r *Registrations) Pending(capability string, now time.Time) bool {
	_, ok := r.Peek(capability, now)
	return ok
}

// Peek returns what a pending capability allows, without using it.
func (r *Registrations) Peek(capability string, now time.Time) (Grant, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e, ok := r.pending[secret.Hash(capability)]
	return e.grant, ok && now.Before(e.expires)
}

// Consume uses the capability up and returns what it allows. One that was used,
// revoked, never issued or has expired is an unauthenticated error; which of
// them is not told.
func (r *Registrations) Consume(capability string, now time.Time) (Grant, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	hash := secret.Hash(capability)
	e, ok := r.pending[hash]
	delete(r.pending, hash)
	if !ok || !now.Before(e.expires) {
		return Grant{}, errdefs.New(errdefs.Unauthenticated, "the plugin registration capability is invalid or expired").
			WithNext("workers are started by the runtime, which gives each its own capability once")
	}
	return e.grant, nil
}

// Revoke takes a capability back; an unknown one is no error.
func (r *Registrations) Revoke(capability string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.pending, secret.Hash(capability))
}

// RevokeBinding takes back the capabilities of workers of one binding's own. That
// of a pool stays: the pool outlives the slot it was started for.
func (r *Registrations) RevokeBinding(b pluginwire.Context) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for hash, e := range r.pending {
		if e.grant.Binding == b && e.grant.Pool == "" {
			delete(r.pending, hash)
		}
	}
}

// RevokePool takes back the capabilities of a digest's pool.
func (r *Registrations) RevokePool(digest string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for hash, e := range r.pending {
		if digest != "" && e.grant.Pool == digest {
			delete(r.pending, hash)
		}
	}
}

// Count returns how many capabilities are pending.
func (r *Registrations) Count(now time.Time) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.prune(now)
	return len(r.pending)
}

func (r *Registrations) prune(now time.Time) {
	for hash, e := range r.pending {
		if !now.Before(e.expires) {
			delete(r.pending, hash)
		}
	}
}

// DebugTokens are the debug keys of workspaces: at most one each.
type DebugTokens struct {
	mu          sync.Mutex
	byWorkspace map[string]debugKey // by workspace UUID
	byHash      map[[32]byte]string // workspace UUID; a replaced key stays until it expires, to be told "fenced"
	old         map[[32]byte]time.Time
}

type debugKey struct {
	text      string
	hash      [32]byte
	workspace pluginwire.Context
	expires   time.Time
}

// NewDebug makes an empty table.
func NewDebug() *DebugTokens {
	return &DebugTokens{byWorkspace: map[string]debugKey{}, byHash: map[[32]byte]string{}, old: map[[32]byte]time.Time{}}
}

// Issue returns the workspace's key and when it ends: the live one, whose life
// asking does not extend, or a new one of DebugKeyLife. A change of instance or
// generation makes a new key and fences the old one at once; to an older generation
// than the live key's nothing is issued (a fenced error).
func (d *DebugTokens) Issue(workspace pluginwire.Context, now time.Time) (text string, expires time.Time, err error) {
	workspace = workspace.Workspace()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.prune(now)
	k, ok := d.byWorkspace[workspace.WorkspaceUUID]
	if ok && k.workspace == workspace {
		return k.text, k.expires, nil
	}
	if ok && k.workspace.InstanceUUID == workspace.InstanceUUID && workspace.PlacementGeneration < k.workspace.PlacementGeneration {
		return "", time.Time{}, errdefs.New(errdefs.Fenced, "the workspace is at placement generation %d and %d is fenced",
			k.workspace.PlacementGeneration, workspace.PlacementGeneration).WithNext("ask again under the workspace's present placement")
	}
	if ok {
		delete(d.byHash, k.hash)
		if len(d.old) < MaxDebugKeys {
			d.old[k.hash] = k.expires
		}
	} else if len(d.byWorkspace) >= MaxDebugKeys {
		return "", time.Time{}, errdefs.New(errdefs.Exhausted, "%d workspaces have a debug key, which is the limit", MaxDebugKeys).
			WithNext("wait until one expires, %v after it was issued", DebugKeyLife)
	}
	k = debugKey{text: secret.Bearer(), workspace: workspace, expires: now.Add(DebugKeyLife)}
	k.hash = secret.Hash(k.text)
	d.byWorkspace[workspace.WorkspaceUUID] = k
	d.byHash[k.hash] = workspace.WorkspaceUUID
	return k.text, k.expires, nil
}

// Check returns whose key it is. An unknown or expired one is an unauthenticated
// error ("expired"); one of an older generation is a fenced error.
func (d *DebugTokens) Check(text string, now time.Time) (pluginwire.Context, error) {
	hash := secret.Hash(text)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.prune(now)
	if id, ok := d.byHash[hash]; ok {
		return d.byWorkspace[id].workspace, nil
	}
	if _, ok := d.old[hash]; ok {
		return pluginwire.Context{}, errdefs.New(errdefs.Fenced, "the plugin debug key is fenced: the workspace has moved to another generation").
			WithNext("get a new debug key from LangBot")
	}
	return pluginwire.Context{}, errdefs.New(errdefs.Unauthenticated, "the plugin debug key is invalid or expired").
		WithNext("get a new debug key from LangBot")
}

func (d *DebugTokens) prune(now time.Time) {
	for id, k := range d.byWorkspace {
		if !now.Before(k.expires) {
			delete(d.byWorkspace, id)
			delete(d.byHash, k.hash)
		}
	}
	for hash, expires := range d.old {
		if !now.Before(expires) {
			delete(d.old, hash)
		}
	}
}
