package httpapi

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// recheckEvery is how often it is looked whether the key of a request that goes
// on, such as a followed log or an attached socket, is still one.
const recheckEvery = 5 * time.Second

// credentialGiven is what a request was authenticated with.
type credentialGiven string

// String keeps it out of texts.
func (credentialGiven) String() string { return "(credential)" }

// guard watches over one request: a key that is revoked ends what was begun with
// it. A run's token needs no watch: before it ends, the run's processes are closed
// or fenced, and take nothing more. Who follows a log of the run may read it to its
// end, which is often a little later than that of the run; of a fenced process it
// comes with the end of the fence.
type guard struct {
	h          *Handler
	ctx        context.Context //nolint:containedctx // that of the request it watches
	cancel     context.CancelCauseFunc
	credential string

	mu    sync.Mutex
	over  bool
	timer *time.Timer
}

// guarded returns the request with a context that ends when its key does; then
// the refusal is the cause. end must be called when the request is over.
func (h *Handler) guarded(r *http.Request) (_ *http.Request, end func()) {
	credential, ok := r.Context().Value(keyCredential).(credentialGiven)
	if !ok || principalOf(r.Context()).Kind == authz.Run {
		return r, func() {}
	}
	g := &guard{h: h, credential: string(credential)}
	g.ctx, g.cancel = context.WithCancelCause(r.Context())
	g.mu.Lock()
	g.timer = time.AfterFunc(h.recheck, g.look)
	g.mu.Unlock()
	return r.WithContext(context.WithValue(g.ctx, keyGuard, g)), g.end
}

func (g *guard) end() {
	g.cancel(nil)
	g.mu.Lock() // waits for a look under way
	defer g.mu.Unlock()
	g.over = true
	g.timer.Stop()
}

func (g *guard) look() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.over || g.holds() != nil {
		return
	}
	g.timer.Reset(g.h.recheck)
}

// holds returns why the key holds no more, and ends the request then. Trouble of
// the ledger is no reason.
func (g *guard) holds() error {
	if err := refusalOf(g.ctx); err != nil {
		return err
	}
	_, err := g.h.cfg.Tenants.Authenticate(g.ctx, g.credential)
	if !errdefs.Is(err, errdefs.Unauthenticated) {
		return nil
	}
	g.cancel(err)
	return refusalOf(g.ctx) // another refusal may have come first
}

// holds is asked before each act of a request that carries several.
func holds(ctx context.Context) error {
	if g, ok := ctx.Value(keyGuard).(*guard); ok {
		return g.holds()
	}
	return nil
}

// refusalOf is why a request was ended by its guard, or nil.
func refusalOf(ctx context.Context) error {
	if err := context.Cause(ctx); errdefs.Is(err, errdefs.Unauthenticated) {
		return err
	}
	return nil
}
