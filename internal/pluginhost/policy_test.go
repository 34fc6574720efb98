package pluginhost

import (
	"context"
	"encoding/base64"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/pluginwire"
	"github.com/stockade-run/stockade/internal/transfer"
)

// TestOverridesByMode: the published SDK 0.7 has limits of one worker by mode, for the
// shared profile; they reach the launch and the size of what a worker may push.
func TestOverridesByMode(t *testing.T) {
	for _, c := range []struct {
		profile         pluginwire.Profile
		dedicated, pool pluginwire.WorkerPolicy
	}{
		{pluginwire.ProfileShared, pluginwire.WorkerPolicy{MaxCPUs: 0.5, MaxMemoryMB: 128, MaxPids: 32, MaxOpenFiles: 64, MaxFileSizeMB: 1},
			pluginwire.WorkerPolicy{MaxCPUs: 1, MaxMemoryMB: 1024, MaxPids: 300, MaxOpenFiles: 999, MaxFileSizeMB: 8}},
		{pluginwire.ProfileOSS, pluginwire.WorkerPolicy{MaxCPUs: 1, MaxMemoryMB: 128, MaxPids: 32, MaxOpenFiles: 64, MaxFileSizeMB: 8},
			pluginwire.WorkerPolicy{MaxCPUs: 1, MaxMemoryMB: 128, MaxPids: 32, MaxOpenFiles: 64, MaxFileSizeMB: 8}},
	} {
		t.Run(string(c.profile), func(t *testing.T) {
			p := policy()
			p.Dedicated = pluginwire.WorkerOverrides{MaxCPUs: 0.5, MaxFileSizeMB: 1}
			p.Shared = pluginwire.WorkerOverrides{MaxMemoryMB: 1024, MaxPids: 300, MaxOpenFiles: 999}
			inBubble(t, c.profile, p, func(r *rig) {
				kit := pack(r.t, "toy", "1")
				alone, slot := kit.bind("alone", 1, 1), kit.bind("slot", 1, 1)
				r.run(alone, kit, pluginwire.ModeDedicated)
				r.run(slot, kit, inPool)
				for n, want := range []pluginwire.WorkerPolicy{c.dedicated, c.pool} {
					got := r.launcher.nth(n).spec.Policy
					if got.MaxCPUs != want.MaxCPUs || got.MaxMemoryMB != want.MaxMemoryMB || got.MaxPids != want.MaxPids ||
						got.MaxOpenFiles != want.MaxOpenFiles || got.MaxFileSizeMB != want.MaxFileSizeMB {
						r.t.Errorf("worker %d has %+v, want %+v", n, got, want)
					}
				}
				for n, b := range []pluginwire.Context{alone, slot} {
					_, err := transfer.Send(r.t.Context(), r.launcher.nth(n).conn, make([]byte, 2<<20), "bin", b)
					if limit := []pluginwire.WorkerPolicy{c.dedicated, c.pool}[n].MaxFileSizeMB; (err != nil) != (limit < 2) {
						r.t.Errorf("2 MiB where %d MiB is the limit: %v", limit, err)
					}
				}
			})
		})
	}
}

// TestFilesOfARevokedSlot: what a slot was pushing when its binding was revoked does
// not stay until the pool ends, and its sibling's file is finished.
func TestFilesOfARevokedSlot(t *testing.T) {
	inBubble(t, pluginwire.ProfileShared, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		a, b := p.bind("inst-a", 1, 1), p.bind("inst-b", 1, 1)
		r.run(a, p, inPool)
		r.run(b, p, inPool)
		w, l := r.launcher.nth(0), r.plugin(a).link
		chunk := func(key string, index int, as pluginwire.Context) error {
			_, err := w.ask(pluginwire.ActionFileChunk, map[string]any{"file_key": key, "file_length": 2, "chunk_amount": 2, "chunk_size": 1,
				"chunk_index": index, "chunk_base64": base64.StdEncoding.EncodeToString([]byte("x"))}, as)
			return err
		}
		for key, as := range map[string]pluginwire.Context{"of-a": a, "of-b": b} {
			if err := chunk(key, 0, as); err != nil {
				r.t.Fatal(err)
			}
		}
		if _, err := transfer.Send(context.Background(), w.conn, []byte("whole"), "bin", a); err != nil {
			r.t.Fatal(err)
		}
		if n := l.holder.Held(); n != 3 {
			r.t.Fatalf("%d files are held, not 3", n)
		}
		r.remove(a)
		if n := l.holder.Held(); n != 1 {
			r.t.Errorf("%d files are held, not the sibling's alone", n)
		}
		if err := chunk("of-a", 1, a); err == nil || !strings.Contains(err.Error(), "not attached") {
			r.t.Errorf("the rest of the revoked slot's file: %v", err)
		}
		if err := chunk("of-b", 1, b); err != nil {
			r.t.Errorf("the sibling was disturbed: %v", err)
		}
		if got, err := r.plugin(b).ReadFile("of-b"); err != nil || string(got) != "xx" {
			r.t.Errorf("the sibling's file: %q, %v", got, err)
		}
	})
}

// TestNoConfigurationIsTold: a plugin's configuration may hold secrets; the list of
// plugins tells none, as the published runtimes do.
func TestNoConfigurationIsTold(t *testing.T) {
	inBubble(t, pluginwire.ProfileShared, policy(), func(r *rig) {
		p := pack(r.t, "toy", "1")
		a, b := p.bind("inst-a", 1, 1), p.bind("inst-b", 1, 1)
		r.host.set(map[string]string{"inst-a": `{"key":"hush"}`, "inst-b": `{"key":"hush"}`})
		r.run(a, p, pluginwire.ModeDedicated)
		r.run(b, p, inPool)
		for _, on := range []pluginwire.Context{a, b} {
			c := string(r.plugin(on).Container().JSON)
			if strings.Contains(c, "hush") || !strings.Contains(c, `"plugin_config":{}`) {
				r.t.Errorf("%s", c)
			}
		}
	})
}
