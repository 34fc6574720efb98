package cli

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/serverproc"
)

type serverKey struct{}

// TestScripts runs the scripts of testdata/script against the real programs: the
// server, the host program, runc. Each script has its own state directory and
// starts its own server with the command "server".
//
//	server start [FLAG…]   start it, or start it again on the same port
//	server kill            SIGKILL
//	server stop            SIGTERM; must end well
//	make-image FORM PATH   layout or docker-save: an image around busybox
//	make-data DIR NAME…    a runtime's data directory with a package of each name, whose digest is $NAME
//	host kill              SIGKILL the host program of the script's state directory
//	await PATTERN CMD…     repeat a command until its output matches, for a minute
//	daemon start NAME MODE DIR   a daemon of the relay whose state directory is DIR
//	daemon stop NAME
//	json FILE PATH NAME    set $NAME to a value of a JSON file, by a path like items.0.handle
func TestScripts(t *testing.T) {
	need.Runc(t)
	need.Tool(t, "sqlite3", "sqlite3")
	busybox := need.Tool(t, "busybox", "busybox-static")
	bin := t.TempDir()
	need.Programs(t, bin)
	testscript.Run(t, testscript.Params{
		Dir: "testdata/script", RequireExplicitExec: true, Condition: condition,
		Setup: func(env *testscript.Env) error {
			env.Setenv("PATH", bin+":"+os.Getenv("PATH"))
			env.Setenv("STOCKADE_STATE_DIR", filepath.Join(env.WorkDir, "state"))
			env.Setenv("HOME", env.WorkDir)
			env.Setenv("BIN", bin)
			agents, err := vendors()
			if err != nil {
				return err
			}
			env.Setenv("AGENTS", agents)
			python, err := sdk()
			if err != nil {
				return err
			}
			env.Setenv("SDK", python) // a Python, where the condition sdk holds
			daemons := map[string]*scriptDaemon{}
			env.Values[daemonsKey{}] = daemons
			env.Defer(func() {
				for _, d := range daemons {
					d.stop()
				}
			})
			env.Values[serverKey{}] = &scriptServer{bin: bin, state: filepath.Join(env.WorkDir, "state")}
			env.Defer(func() {
				if err := env.Values[serverKey{}].(*scriptServer).tidy(); err != nil {
					env.T().Log("tidy:", err)
					t.Error(err)
				}
			})
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"server": serverCmd,
			"host":   hostCmd,
			"model":  modelCmd,
			"json":   jsonCmd,
			"await":  awaitCmd,
			"daemon": daemonCmd,

			"make-image": makeImageCmd(busybox),
			"make-data":  makeDataCmd,
		},
	})
}

type scriptServer struct {
	bin, state string
	server     *serverproc.Server
}

func serverCmd(ts *testscript.TestScript, neg bool, args []string) {
	s := ts.Value(serverKey{}).(*scriptServer)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if len(args) == 0 || neg {
		ts.Fatalf("usage: server start|kill|stop")
	}
	switch args[0] {
	case "start":
		if s.server == nil || len(args) > 1 {
			cfg := serverproc.Config{Exe: filepath.Join(s.bin, "stockade"), StateDir: s.state, Args: args[1:]}
			if s.server != nil {
				cfg.Listen = strings.TrimPrefix(s.server.URL(), "http://")
			}
			var err error
			s.server, err = serverproc.New(cfg)
			ts.Check(err)
		}
		ts.Check(s.server.Start(ctx))
	case "kill":
		ts.Check(s.server.Kill())
	case "stop":
		ts.Check(s.server.Stop(ctx))
	default:
		ts.Fatalf("unknown: server %s", args[0])
	}
}

func hostCmd(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) != 1 || args[0] != "kill" || neg {
		ts.Fatalf("usage: host kill")
	}
	s := ts.Value(serverKey{}).(*scriptServer)
	cmdlines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	ts.Check(err)
	killed := 0
	for _, file := range cmdlines {
		b, err := os.ReadFile(file)
		if err != nil || !strings.Contains(string(b), "\x00serve\x00--dir\x00"+filepath.Join(s.state, "host")+"\x00") {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		ts.Check(err)
		ts.Check(syscall.Kill(pid, syscall.SIGKILL))
		killed++
	}
	if killed != 1 {
		ts.Fatalf("%d host programs were found, not one", killed)
	}
}

func awaitCmd(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) < 2 || neg {
		ts.Fatalf("usage: await PATTERN CMD…")
	}
	pattern := regexp.MustCompile("(?m)" + args[0])
	deadline := time.After(time.Minute)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		_ = ts.Exec(args[1], args[2:]...)
		out := ts.ReadFile("stdout") + ts.ReadFile("stderr")
		if pattern.MatchString(out) {
			return
		}
		select {
		case <-deadline:
			ts.Fatalf("%s never said %s, but:\n%s", strings.Join(args[1:], " "), args[0], out)
		case <-tick.C:
		}
	}
}

func jsonCmd(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) != 3 || neg {
		ts.Fatalf("usage: json FILE PATH NAME")
	}
	value, err := jsonPath([]byte(ts.ReadFile(args[0])), args[1])
	ts.Check(err)
	ts.Setenv(args[2], value)
}

// tidy closes and removes everything a script left, so that the host program
// ends with the server and nothing stays on the machine.
func (s *scriptServer) tidy() error {
	if s.server == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if s.server.PID() == 0 {
		if err := s.server.Start(ctx); err != nil {
			return err
		}
	}
	admin, err := s.server.Client("admin")
	if err != nil {
		return err
	}
	defer admin.CloseIdle()
	return errors.Join(closeEverything(ctx, s.server), s.server.Stop(ctx))
}

func closeEverything(ctx context.Context, s *serverproc.Server) error {
	tenant, err := s.Client("default")
	if err != nil {
		return err
	}
	defer tenant.CloseIdle()
	var errs []error
	procs, err := tenant.Processes(ctx, client.ProcessFilter{Live: true})
	errs = append(errs, err)
	now := int64(0)
	for _, p := range procs.Items {
		_, err := tenant.Process(p.Handle).Close(ctx, api.CloseRequest{Reason: "script over", GraceMillis: &now})
		errs = append(errs, err)
	}
	runs, err := tenant.Runs(ctx, client.Page{Limit: 1000})
	errs = append(errs, err)
	for _, r := range runs.Items {
		if r.State != api.RunFinished {
			_, err := tenant.FinishRun(ctx, r.ID, api.FinishRequest{Reason: "script over", GraceMillis: &now})
			errs = append(errs, err)
		}
	}
	boxes, err := tenant.Boxes(ctx, client.Page{Limit: 1000})
	errs = append(errs, err)
	for _, b := range boxes.Items {
		errs = append(errs, tenant.RemoveBox(ctx, b.ID))
	}
	return errors.Join(errs...)
}

// TestEveryCommandHelps holds that each command says what it does with an example.
func TestEveryCommandHelps(t *testing.T) {
	t.Parallel()
	a := &app{}
	for _, c := range allCommands(a.root()) {
		if c.Short == "" || c.Runnable() && c.Example == "" && c.HasParent() {
			t.Errorf("%s needs a short text and an example", c.CommandPath())
		}
		if strings.HasSuffix(c.Short, ".") {
			t.Errorf("%s: the short text ends in a full stop", c.CommandPath())
		}
	}
}
