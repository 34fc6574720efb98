package broker

import (
	"testing"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/authz"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/secret"

	"github.com/stockade-run/stockade/internal/ident"
	"github.com/stockade-run/stockade/internal/store"
)

func TestWriteByOffset(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		p := r.open("one")
		write := func(offset int64, data string, eof bool) (api.StdinState, error) {
			return r.b.Write(r.ctx, r.run, p.Handle, offset, []byte(data), eof)
		}
		st, err := write(0, "hello", false)
		r.ok(err)
		if st.Accepted != 5 {
			r.t.Fatalf("got %+v", st)
		}
		st, err = write(0, "hello world", true) // a repeat with more
		r.ok(err)
		if st.Accepted != 11 || !st.EOF || string(r.host.procs[p.Handle].in) != "hello world" {
			r.t.Fatalf("got %+v, %q", st, r.host.procs[p.Handle].in)
		}
		for _, offset := range []int64{-1, api.MaxOffset + 1, api.MaxOffset} {
			_, err := write(offset, "x", false)
			r.code(err, errdefs.Invalid)
		}
		_, err = write(99, "x", false)
		r.code(err, errdefs.Conflict)
		_, err = r.b.Write(r.ctx, r.run, p.Handle, 0, make([]byte, MaxWrite+1), false)
		r.code(err, errdefs.Invalid)

		// The answer of a write is lost; repeating it is harmless.
		lose := true
		r.host.set(func() {
			r.host.fault = func(op, _ string) fault {
				if op == "stdin" && lose {
					lose = false
					return loseAfter
				}
				return none
			}
		})
		_, err = write(0, "hello world", true)
		if err != nil { // the client may have repeated it by itself
			r.code(err, errdefs.Unavailable)
		}

		r.host.exit(p.Handle, 0)
		r.becomes(p.Handle, api.StateClosed)
		st, err = write(0, "hello world", true)
		r.ok(err)
		if st.Accepted != 11 || !st.EOF {
			r.t.Fatalf("a repeat after the end: %+v", st)
		}
		_, err = write(11, "more", false)
		r.code(err, errdefs.Conflict)
	})
}

func TestInputNeedsAnInput(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		req := request("one", "true")
		req.Stdin = false
		p, err := r.b.Open(r.ctx, r.run, req)
		r.ok(err)
		_, err = r.b.Write(r.ctx, r.run, p.Handle, 0, []byte("x"), false)
		r.code(err, errdefs.Invalid)
		r.code(r.b.Resize(r.ctx, r.run, p.Handle, api.Winsize{Rows: 2, Cols: 2}), errdefs.Invalid)

		req = request("two", "sh")
		req.PTY = &api.Winsize{Rows: 24, Cols: 80}
		p, err = r.b.Open(r.ctx, r.run, req)
		r.ok(err)
		r.ok(r.b.Resize(r.ctx, r.run, p.Handle, api.Winsize{Rows: 2, Cols: 2}))
		r.code(r.b.Resize(r.ctx, r.run, p.Handle, api.Winsize{}), errdefs.Invalid)
		r.ok(r.b.Signal(r.ctx, r.run, p.Handle, "SIGINT"))
		r.code(r.b.Signal(r.ctx, r.run, p.Handle, "SIGKILL"), errdefs.Invalid)
		if got := r.host.procs[p.Handle].sigs; len(got) != 1 || got[0] != "SIGINT" {
			r.t.Errorf("signals %v", got)
		}
		r.ok(r.b.Ack(r.ctx, r.run, p.Handle, cursorAt(p.Handle, 0)))
		r.host.exit(p.Handle, 0)
		r.becomes(p.Handle, api.StateClosed)
		r.code(r.b.Signal(r.ctx, r.run, p.Handle, "SIGINT"), errdefs.Conflict)
		r.code(r.b.Resize(r.ctx, r.run, p.Handle, api.Winsize{Rows: 2, Cols: 2}), errdefs.Conflict)
	})
}

// What belongs to somebody else looks like what does not exist, in every call (P6).
func TestOthersLookMissing(t *testing.T) {
	t.Parallel()
	inBubble(t, Limits{}, func(r *rig) {
		p := r.open("one")
		r.ok(r.ledger.CreateWorkspace(r.ctx, store.Workspace{Name: "x", Created: now()}, r.b.audit(r.admin, "", "workspace.create", "x", nil)))
		otherKey := authz.Principal{Kind: authz.Workspace, Workspace: "x", Key: secret.ID(ident.Key)}
		otherRun := r.newRun(otherKey, r.newBox("x"))
		sibling := r.newRun(r.key, r.box)
		grace := millis(0)
		calls := map[string]func(who authz.Principal, handle string) error{
			"get":   func(w authz.Principal, h string) error { _, err := r.b.Get(r.ctx, w, h); return err },
			"read":  func(w authz.Principal, h string) error { _, err := r.b.Read(r.ctx, w, h, ReadQuery{}); return err },
			"write": func(w authz.Principal, h string) error { _, err := r.b.Write(r.ctx, w, h, 0, nil, false); return err },
			"close": func(w authz.Principal, h string) error {
				_, err := r.b.Close(r.ctx, w, h, api.CloseRequest{GraceMillis: grace})
				return err
			},
			"signal": func(w authz.Principal, h string) error { return r.b.Signal(r.ctx, w, h, "SIGINT") },
			"resize": func(w authz.Principal, h string) error { return r.b.Resize(r.ctx, w, h, api.Winsize{Rows: 1, Cols: 1}) },
			"ack":    func(w authz.Principal, h string) error { return r.b.Ack(r.ctx, w, h, cursorAt(h, 0)) },
			"stream": func(w authz.Principal, h string) error { _, err := r.b.Stream(r.ctx, w, h, StreamQuery{}); return err },
		}
		missing := secret.ID(ident.Process)
		for name, call := range calls {
			for who, principal := range map[string]authz.Principal{"another tenant": otherKey, "another tenant's run": otherRun, "another run": sibling} {
				theirs, nobodys := call(principal, p.Handle), call(principal, missing)
				r.code(theirs, errdefs.NotFound)
				r.code(nobodys, errdefs.NotFound)
				if a, b := theirs.Error(), nobodys.Error(); len(a) != len(b) {
					r.t.Errorf("%s by %s: %q is not like %q", name, who, a, b)
				}
			}
			if err := call(authz.Principal{}, p.Handle); !errdefs.Is(err, errdefs.Unauthenticated) {
				r.t.Errorf("%s by nobody: %v", name, err)
			}
		}
		_, err := r.b.GetByRequest(r.ctx, sibling, "one")
		r.code(err, errdefs.NotFound)
		_, err = r.b.Run(r.ctx, otherKey, r.run.Run)
		r.code(err, errdefs.NotFound)
		_, err = r.b.FinishRun(r.ctx, otherKey, r.run.Run, api.FinishRequest{})
		r.code(err, errdefs.NotFound)
		_, err = r.b.CreateRun(r.ctx, otherKey, api.RunRequest{Box: r.box})
		r.code(err, errdefs.NotFound)
		_, err = r.b.List(r.ctx, otherKey, ListQuery{Run: r.run.Run})
		r.code(err, errdefs.NotFound)
		list, err := r.b.List(r.ctx, otherKey, ListQuery{})
		r.ok(err)
		if len(list.Items) != 0 {
			r.t.Errorf("another tenant lists %v", list.Items)
		}
		_, err = r.b.Open(r.ctx, r.key, request("two", "true"))
		r.code(err, errdefs.Denied)
		req := request("two", "true")
		req.Box = r.newBox("w")
		_, err = r.b.Open(r.ctx, r.run, req)
		r.code(err, errdefs.NotFound)
		if len(r.host.alive()) != 1 {
			r.t.Error("somebody else's call had an effect")
		}
	})
}
