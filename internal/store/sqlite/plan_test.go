package sqlite

import (
	"context"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/store"
)

// TestPlans: what is asked often reads an index and not the whole history.
func TestPlans(t *testing.T) {
	t.Parallel()
	s := open(t, Config{Path: tempPath(t)})
	defer s.Close()
	page := store.Page{Limit: 100}
	after := store.Page{Limit: 100, After: "x"}
	workspace, run := store.Scope{Workspace: "w"}, store.Scope{Workspace: "w", Run: "r"}
	everything := store.Scope{All: true}
	for _, c := range []struct {
		name string
		sc   store.Scope
		f    store.ProcessFilter
		want string
	}{
		{"all", everything, store.ProcessFilter{Page: page}, "SCAN processes"}, // backwards by seq: as much as the page takes
		{"all, next page", everything, store.ProcessFilter{Page: after}, "USING INTEGER PRIMARY KEY (rowid<?)"},
		{"all live", everything, store.ProcessFilter{Live: true, Page: after}, "processes_live_order (live=? AND rowid<?)"},
		{"live of a target", everything, store.ProcessFilter{Live: true, Target: "t", Page: page}, "processes_live_order (live=?)"},
		{"retention", everything, store.ProcessFilter{ClosedBefore: at, LogKept: true, Page: page}, "processes_kept (closed<?)"},
		{"workspace", workspace, store.ProcessFilter{Page: after}, "processes_workspace (workspace=? AND seq<?)"},
		{"live of a workspace", workspace, store.ProcessFilter{Live: true, Page: page}, "processes_live_order (live=?)"},
		{"live of a box", workspace, store.ProcessFilter{Live: true, Box: "b", Page: page}, "processes_live (workspace=? AND box=?)"},
		{"run", run, store.ProcessFilter{Page: page}, "sqlite_autoindex_processes_2 (run=?)"},
		{"live of a run", run, store.ProcessFilter{Live: true, Page: after}, "processes_live_order (live=? AND rowid<?)"},
	} {
		query, args := processListing(c.sc, c.f).sql(c.f.Page)
		if plan := planOf(t, s, query, args...); !strings.Contains(plan, c.want) {
			t.Errorf("%s: the plan is\n%s, want %s", c.name, plan, c.want)
		}
	}
	for name, c := range map[string]struct {
		query string
		args  []any
	}{
		"a process":      {`SELECT 1 FROM processes WHERE handle = ?`, []any{"h"}},
		"standing fence": {standingFor, []any{"t", "b"}},
	} {
		if plan := planOf(t, s, c.query, c.args...); !strings.Contains(plan, "SEARCH") || strings.Contains(plan, "SCAN") {
			t.Errorf("%s: the plan is\n%s", name, plan)
		}
	}
}

func planOf(t *testing.T, s *Store, query string, args ...any) string {
	t.Helper()
	lines, err := queryAll(context.Background(), s.reads, func(r row) (string, error) {
		var id, parent, unused int
		var detail string
		return detail, r.Scan(&id, &parent, &unused, &detail)
	}, "EXPLAIN QUERY PLAN "+query, args...)
	if err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return strings.Join(lines, "\n")
}

// TestEveryListing: every scope with every filter is a query that SQLite can
// answer, an index that is asked for by name included.
func TestEveryListing(t *testing.T) {
	t.Parallel()
	s := open(t, Config{Path: tempPath(t)})
	defer s.Close()
	for _, sc := range []store.Scope{{}, {All: true}, {Workspace: "w"}, {Workspace: "w", Run: "r"}, {Run: "r"}} {
		for bits := range 32 {
			f := store.ProcessFilter{Live: bits&1 != 0, LogKept: bits&2 != 0, Page: store.Page{Limit: 1}}
			if bits&4 != 0 {
				f.Box = "b"
			}
			if bits&8 != 0 {
				f.Target = "t"
			}
			if bits&16 != 0 {
				f.ClosedBefore = at
			}
			if _, err := s.Processes(t.Context(), sc, f); err != nil {
				t.Errorf("%+v %+v: %v", sc, f, err)
			}
		}
	}
}
