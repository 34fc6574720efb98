package authz

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/errdefs"
)

var (
	admin     = Principal{Kind: Admin, Key: "key_a"}
	workspace = Principal{Kind: Workspace, Key: "key_w", Workspace: "w"}
	run       = Principal{Kind: Run, Workspace: "w", Run: "run_r"}
)

// TestTable holds the whole table as it was decided, apart from how it is
// written in the code: A admin, W workspace key, R run token.
func TestTable(t *testing.T) {
	t.Parallel()
	want := map[Action]string{
		WorkspaceCreate: "A", WorkspaceList: "A", KeyCreate: "A", KeyList: "A", KeyRevoke: "A",
		TargetRead: "A", TargetUpdate: "A", AuditRead: "A", MetricsRead: "A",
		ImageRead: "AW", ImageLoad: "A", ImageRemove: "A", FenceRead: "AW", FenceClear: "A",
		BoxAcquire: "W", BoxRead: "AW", BoxRemove: "AW", BoxFilesPut: "W", BoxFilesGet: "W",
		RunCreate: "W", RunRead: "AWR", RunList: "AW", RunFinish: "AWR",
		ProcessOpen: "R", ProcessReadByRequest: "R", ProcessCloseByRequest: "R",
		ProcessRead: "AWR", ProcessList: "AWR", ProcessOutput: "AWR", ProcessClose: "AWR",
		ProcessAck: "WR", ProcessWrite: "WR", ProcessSignal: "WR", ProcessResize: "WR", ProcessAttach: "WR",
		RelayJobRun: "W", RelayJobRead: "AW", RelayJobCancel: "AW", RelayDaemonRead: "AW", RelayFenceRead: "A", RelayFenceClear: "A",
	}
	if len(Actions()) != len(want) {
		t.Errorf("there are %d actions, the test knows %d", len(Actions()), len(want))
	}
	for _, a := range Actions() {
		for letter, p := range map[string]Principal{"A": admin, "W": workspace, "R": run} {
			allowed := strings.Contains(want[a], letter)
			err := Check(p, a)
			if allowed != (err == nil) || allowed != Allowed(p.Kind, a) {
				t.Errorf("%s by %s: %v, want allowed %v", a, p.Kind, err, allowed)
			}
			if err == nil {
				continue
			}
			e, ok := err.(*errdefs.Error)
			if !ok || e.Code != errdefs.Denied || e.Next == "" || e.Detail["action"] != string(a) {
				t.Errorf("%s by %s: %#v", a, p.Kind, err)
			}
		}
	}
}

func TestActionsAreDistinct(t *testing.T) {
	t.Parallel()
	all := Actions()
	slices.Sort(all)
	if len(slices.Compact(slices.Clone(all))) != len(all) {
		t.Errorf("an action is there twice: %v", all)
	}
	for _, r := range rules {
		if len(r.kinds) == 0 || r.what == "" {
			t.Errorf("the rule for %s is not whole", r.action)
		}
	}
}

func TestDeniedSaysWhatIsNeeded(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		p    Principal
		a    Action
		says []string
	}{
		{workspace, ProcessOpen, []string{"opening a process is not allowed with a workspace key", "the token of the run"}},
		{admin, ProcessOpen, []string{"with an admin key", "the token of the run"}},
		{run, RunCreate, []string{"with a run token", "a key of the workspace"}},
		{workspace, FenceClear, []string{"clearing a fence", "admin.key"}},
	} {
		err := Check(c.p, c.a)
		for _, word := range c.says {
			if err == nil || !strings.Contains(err.Error(), word) {
				t.Errorf("%s by %s: %v does not say %q", c.a, c.p.Kind, err, word)
			}
		}
	}
}

// TestIncompletePrincipals: what is half filled in may do nothing and sees nothing.
func TestIncompletePrincipals(t *testing.T) {
	t.Parallel()
	for _, p := range []Principal{
		{}, {Kind: "root"}, {Kind: "ADMIN"}, {Kind: Workspace, Key: "key_w"}, {Kind: Run, Run: "run_r"}, {Kind: Run, Workspace: "w"},
		{Key: "key_a", Workspace: "w", Run: "run_r"},
	} {
		if s := p.Scope(); s != (Scope{}) {
			t.Errorf("%+v has the scope %+v", p, s)
		}
		for _, a := range Actions() {
			if err := Check(p, a); !errdefs.Is(err, errdefs.Unauthenticated) {
				t.Errorf("%s by %+v: %v", a, p, err)
			}
		}
	}
}

func TestScopes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		p    Principal
		want Scope
	}{
		{admin, Scope{All: true}},
		{workspace, Scope{Workspace: "w"}},
		{run, Scope{Workspace: "w", Run: "run_r"}},
		// What does not belong to the kind does not widen it.
		{Principal{Kind: Workspace, Workspace: "w", Run: "run_r"}, Scope{Workspace: "w"}},
	} {
		if got := c.p.Scope(); got != c.want {
			t.Errorf("%+v: %+v, want %+v", c.p, got, c.want)
		}
	}
}

func TestUnknownAction(t *testing.T) {
	t.Parallel()
	if err := Check(admin, "process.teleport"); !errdefs.Is(err, errdefs.Internal) {
		t.Error(err)
	}
	if Allowed(Admin, "") {
		t.Error("an action without a name is allowed")
	}
}

func TestString(t *testing.T) {
	t.Parallel()
	got := fmt.Sprint(admin, " ", workspace, " ", run, " ", Principal{})
	if got != "key_a key_w run_r nobody" {
		t.Error(got)
	}
}
