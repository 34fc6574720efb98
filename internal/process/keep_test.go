package process

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/wire"
)

// TestConcludeExhaustively tries every combination of evidence and holds P3 for
// the exit that is made of it.
func TestConcludeExhaustively(t *testing.T) {
	t.Parallel()
	reports := []InitReport{
		{Kind: api.ExitExited}, {Kind: api.ExitExited, Code: 3}, {Kind: api.ExitExited, Code: 127}, {Kind: api.ExitExited, Code: 137},
		{Kind: api.ExitExited, Code: -1}, {Kind: api.ExitExited, Code: 256},
		{Kind: api.ExitSignalled, Signal: "SIGKILL"}, {Kind: api.ExitSignalled, Signal: "SIGTERM"}, {Kind: api.ExitSignalled, Signal: "SIGNONSENSE"},
		{Kind: api.ExitSpawnFailed, Detail: "no such file"}, {Kind: api.ExitOOM}, {Kind: api.ExitDeadline}, {},
	}
	statuses := []Reaped{{}, {Code: 3}, {Code: 127}, {Code: 137}, {Code: 143}, {Signal: 9}, {Signal: 11}, {Signal: 15}}
	n := 0
	for _, report := range reports {
		for _, status := range statuses {
			for bits := range 1 << 5 {
				for cause := CauseNone; cause <= CauseLog; cause++ {
					s := KeepState{
						Begun: true, Phase: wire.PhaseStopping, Stage: StageEnding, StartedAt: past, EndedAt: past, Cause: cause,
						HasReport: bits&1 != 0, ReportFirst: bits&2 != 0, ReportDone: true, Reaped: true, Status: status,
						Killed: bits&4 != 0, OOMDone: true, Drained: true, Checked: true, EmptyAt: past, Deadline: time.Second,
					}
					if s.HasReport {
						s.Report = report
					}
					if bits&8 != 0 {
						s.OOMKills = 2
					}
					if bits&16 != 0 {
						s.LogDetail, s.DrainDetail = "LOG", "DRAIN"
					}
					r := WriteExitRecord{Exit: s.conclude(), Method: "pid_namespace", EmptyAt: past}
					if err := checkRecord(s, r); err != nil {
						t.Fatalf("%v\nfrom %+v\nexit %+v", err, s, r.Exit)
					}
					if bits&16 != 0 && !(strings.Contains(r.Exit.Detail, "LOG") && strings.Contains(r.Exit.Detail, "DRAIN")) {
						t.Fatalf("the detail does not say that output is missing: %q", r.Exit.Detail)
					}
					if bits&16 != 0 && r.Exit.Code != nil && *r.Exit.Code == 0 {
						t.Fatalf("a success although its output could not be kept, from %+v", s)
					}
					n++
				}
			}
		}
	}
	t.Logf("%d combinations", n)
}

// runKeep feeds events one second apart and returns every effect but the timers.
func runKeep(t *testing.T, events ...KeepEvent) (KeepState, []KeepEffect) {
	t.Helper()
	s, at := NewKeep(), now
	var all []KeepEffect
	for _, ev := range events {
		var effects []KeepEffect
		s, effects = KeepStep(s, ev, at)
		for _, e := range effects {
			if _, timer := e.(ArmTimer); !timer {
				all = append(all, e)
			}
		}
		at = at.Add(time.Second)
	}
	return s, all
}

func kindsOf(effects []KeepEffect) (names []string) {
	for _, e := range effects {
		name := strings.TrimPrefix(reflect.TypeOf(e).Name(), "process.")
		if s, ok := e.(SignalTree); ok {
			name += " " + s.Signal
		}
		names = append(names, name)
	}
	return names
}

// keepTail is the usual tail of a life whose init was reaped.
func keepTail(kills int64) []KeepEvent {
	return []KeepEvent{ReportClosed{}, Drained{}, OOMRead{Kills: kills}, Emptied{}, Recorded{}}
}

func TestKeepLives(t *testing.T) {
	t.Parallel()
	exited := func(code int) InitReport { return InitReport{Kind: api.ExitExited, Code: code} }
	signalled := func(sig string) InitReport { return InitReport{Kind: api.ExitSignalled, Signal: sig} }
	begin := []KeepEvent{Begin{}, Started{}}
	end := "LiftCap CheckEmpty ReadOOM WriteExitRecord"
	code := func(n int) *int { return &n }
	tests := []struct {
		name    string
		events  []KeepEvent
		tail    []KeepEvent
		effects string
		exit    api.Exit // Detail: a part of it
		method  string
	}{
		{"exits", append(begin, exited(3), Reaped{Code: 3}), keepTail(0), "LaunchContainer " + end,
			api.Exit{Kind: api.ExitExited, Code: code(3)}, "pid_namespace"},
		{"reaped before the report is read", append(begin, Reaped{Code: 0}, exited(0)), keepTail(0), "LaunchContainer " + end,
			api.Exit{Kind: api.ExitExited, Code: code(0)}, "pid_namespace"},
		{"reaped before the runtime's answer", []KeepEvent{Begin{}, exited(0), Reaped{Code: 0}, Started{}}, keepTail(0), "LaunchContainer " + end,
			api.Exit{Kind: api.ExitExited, Code: code(0)}, "pid_namespace"},
		{"report lost", append(begin, Reaped{Code: 0}), keepTail(0), "LaunchContainer " + end,
			api.Exit{Kind: api.ExitUnknown, Detail: "left no report"}, "pid_namespace"},
		{"report disagrees", append(begin, exited(0), Reaped{Code: 1}), keepTail(0), "LaunchContainer " + end,
			api.Exit{Kind: api.ExitUnknown, Detail: "does not agree"}, "pid_namespace"},
		{"command not found", append(begin, InitReport{Kind: api.ExitSpawnFailed, Detail: "no such file"}, Reaped{Code: 127}), keepTail(0), "LaunchContainer " + end,
			api.Exit{Kind: api.ExitSpawnFailed, Detail: "no such file"}, "pid_namespace"},
		{"crashes", append(begin, signalled("SIGSEGV"), Reaped{Code: 139}), keepTail(0), "LaunchContainer " + end,
			api.Exit{Kind: api.ExitSignalled, Signal: "SIGSEGV"}, "pid_namespace"},
		{"whole tree killed for memory", append(begin, Reaped{Signal: 9}), keepTail(3), "LaunchContainer " + end,
			api.Exit{Kind: api.ExitOOM, Detail: "count 3"}, "pid_namespace"},
		{"command killed for memory", append(begin, signalled("SIGKILL"), Reaped{Code: 137}), keepTail(1), "LaunchContainer " + end,
			api.Exit{Kind: api.ExitOOM}, "pid_namespace"},
		{"a child killed for memory, the command copes", append(begin, exited(0), Reaped{Code: 0}), keepTail(1), "LaunchContainer " + end,
			api.Exit{Kind: api.ExitExited, Code: code(0), Detail: "lack of memory"}, "pid_namespace"},
		{"killed by nobody known", append(begin, Reaped{Signal: 9}), keepTail(0), "LaunchContainer " + end,
			api.Exit{Kind: api.ExitUnknown, Detail: "SIGKILL"}, "pid_namespace"},
		{"closed, ends on SIGTERM", append(begin, KeepClose{Grace: 5 * time.Second}, signalled("SIGTERM"), Reaped{Code: 143}), keepTail(0), "LaunchContainer SignalTree SIGTERM " + end,
			api.Exit{Kind: api.ExitSignalled, Signal: "SIGTERM"}, "pid_namespace"},
		{"closed, ends politely", append(begin, KeepClose{Grace: 5 * time.Second}, exited(0), Reaped{Code: 0}), keepTail(0), "LaunchContainer SignalTree SIGTERM " + end,
			api.Exit{Kind: api.ExitExited, Code: code(0)}, "pid_namespace"},
		{"closed, ignores SIGTERM", append(begin, KeepClose{Grace: 2 * time.Second}, Tick{}, Tick{}, Reaped{Signal: 9}), keepTail(0), "LaunchContainer SignalTree SIGTERM KillTree " + end,
			api.Exit{Kind: api.ExitSignalled, Signal: "SIGKILL"}, "pid_namespace"},
		{"closed without grace", append(begin, KeepClose{}, Reaped{Signal: 9}), keepTail(0), "LaunchContainer KillTree " + end,
			api.Exit{Kind: api.ExitSignalled, Signal: "SIGKILL"}, "pid_namespace"},
		{"closed again, sooner", append(begin, KeepClose{Grace: time.Hour}, KeepClose{Grace: time.Second}, Tick{}, Reaped{Signal: 9}), keepTail(0), "LaunchContainer SignalTree SIGTERM KillTree " + end,
			api.Exit{Kind: api.ExitSignalled, Signal: "SIGKILL"}, "pid_namespace"},
		{"closed while starting", []KeepEvent{Begin{}, KeepClose{Grace: time.Hour}, Started{}, signalled("SIGTERM"), Reaped{Code: 143}}, keepTail(0), "LaunchContainer SignalTree SIGTERM " + end,
			api.Exit{Kind: api.ExitSignalled, Signal: "SIGTERM"}, "pid_namespace"},
		{"closed while starting, grace over", []KeepEvent{Begin{}, KeepClose{Grace: time.Second}, Started{}, Reaped{Signal: 9}}, keepTail(0), "LaunchContainer KillTree " + end,
			api.Exit{Kind: api.ExitSignalled, Signal: "SIGKILL"}, "pid_namespace"},
		{"closed before it began", []KeepEvent{KeepClose{}, Begin{}, Started{}}, []KeepEvent{Recorded{}}, "WriteExitRecord",
			api.Exit{Kind: api.ExitSpawnFailed, Detail: "nothing ran"}, "never_started"},
		{"deadline, ends on SIGTERM", []KeepEvent{Begin{Deadline: time.Second}, Started{}, Tick{}, exited(0), Reaped{Code: 0}}, keepTail(0), "LaunchContainer SignalTree SIGTERM " + end,
			api.Exit{Kind: api.ExitDeadline, Detail: "deadline of 1s passed; told to end, it exited with code 0"}, "pid_namespace"},
		{"deadline, is killed", []KeepEvent{Begin{Deadline: time.Second}, Started{}, Tick{}, Tick{}, Tick{}, Tick{}, Tick{}, Tick{}, Reaped{Signal: 9}}, keepTail(0), "LaunchContainer SignalTree SIGTERM KillTree " + end,
			api.Exit{Kind: api.ExitDeadline, Detail: "the whole tree was killed"}, "pid_namespace"},
		{"deadline between report and wait", []KeepEvent{Begin{Deadline: time.Second}, Started{}, exited(0), Tick{}, Reaped{Code: 0}}, keepTail(0), "LaunchContainer SignalTree SIGTERM " + end,
			api.Exit{Kind: api.ExitExited, Code: code(0)}, "pid_namespace"},
		{"lease renewed in time", []KeepEvent{Begin{Lease: now.Add(2 * time.Second)}, Started{}, Tick{}, LeaseRead{Until: now.Add(time.Hour)}, Tick{}, exited(0), Reaped{Code: 0}}, keepTail(0), "LaunchContainer ReadLease " + end,
			api.Exit{Kind: api.ExitExited, Code: code(0)}, "pid_namespace"},
		{"lease not renewed", []KeepEvent{Begin{Lease: now.Add(2 * time.Second)}, Started{}, Tick{}, LeaseRead{Until: now.Add(2 * time.Second)}, signalled("SIGTERM"), Reaped{Code: 143}}, keepTail(0), "LaunchContainer ReadLease SignalTree SIGTERM " + end,
			api.Exit{Kind: api.ExitDeadline, Detail: "lease expired: no server renewed it; SIGTERM ended it"}, "pid_namespace"},
		{"log full", append(begin, LogFailed{Detail: "disk full"}, signalled("SIGTERM"), Reaped{Code: 143}), keepTail(0), "LaunchContainer SignalTree SIGTERM " + end,
			api.Exit{Kind: api.ExitSignalled, Signal: "SIGTERM", Detail: "disk full"}, "pid_namespace"},
		{"runtime fails", []KeepEvent{Begin{}, RuntimeFailed{Detail: "no such rootfs"}}, keepTail(0), "LaunchContainer LiftCap CheckEmpty WriteExitRecord",
			api.Exit{Kind: api.ExitSpawnFailed, Detail: "no such rootfs"}, "cgroup"},
		{"runtime fails late", []KeepEvent{Begin{}, RuntimeFailed{Detail: "timeout", MayHaveRun: true}}, keepTail(0), "LaunchContainer KillTree LiftCap CheckEmpty WriteExitRecord",
			api.Exit{Kind: api.ExitUnknown, Detail: "timeout"}, "cgroup"},
		{"not empty at first", append(begin, exited(0), Reaped{Code: 0}, NotEmpty{Detail: "one left"}, Tick{}), keepTail(0), "LaunchContainer LiftCap CheckEmpty ReadOOM KillTree CheckEmpty WriteExitRecord",
			api.Exit{Kind: api.ExitExited, Code: code(0)}, "pid_namespace"},
		{"a pipe is held outside", append(begin, exited(0), Reaped{Code: 0}, Tick{}, Tick{}, Tick{}, Tick{}, Tick{}, Tick{}, Tick{}, Tick{}, Tick{}, Tick{}, OOMRead{}, Emptied{}, Drained{Detail: "held"}), []KeepEvent{Recorded{}}, "LaunchContainer LiftCap CheckEmpty ReadOOM CutPipes WriteExitRecord",
			api.Exit{Kind: api.ExitExited, Code: code(0), Detail: "output may be incomplete: held"}, "pid_namespace"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s, effects := runKeep(t, append(append([]KeepEvent{}, tt.events...), tt.tail...)...)
			if got := strings.Join(kindsOf(effects), " "); got != tt.effects {
				t.Errorf("effects\n got %s\nwant %s", got, tt.effects)
			}
			if s.Phase != wire.PhaseEnded {
				t.Fatalf("it did not end: %+v", s)
			}
			r := effects[len(effects)-1].(WriteExitRecord)
			if !strings.Contains(r.Exit.Detail, tt.exit.Detail) {
				t.Errorf("detail %q, want something with %q", r.Exit.Detail, tt.exit.Detail)
			}
			r.Exit.Detail, tt.exit.Detail = "", ""
			if !reflect.DeepEqual(r.Exit, tt.exit) || r.Method != tt.method {
				t.Errorf("exit %+v by %q, want %+v by %q", r.Exit, r.Method, tt.exit, tt.method)
			}
		})
	}
}

func TestKeepUnproven(t *testing.T) {
	t.Parallel()
	// Something stays in the cgroup: after KeepProof the record says so.
	s, _ := runKeep(t, Begin{}, Started{}, InitReport{Kind: api.ExitExited}, Reaped{}, ReportClosed{}, Drained{}, OOMRead{})
	at := now.Add(time.Hour)
	s, effects := KeepStep(s, NotEmpty{Detail: "process 7 is in it"}, at)
	r, ok := effects[0].(WriteExitRecord)
	if !ok || r.Method != "" || r.Unproven != "process 7 is in it" || !s.Recording {
		t.Fatalf("effects %+v", effects)
	}
	// A record that cannot be written is tried again, and nothing ends before.
	s, effects = KeepStep(s, RecordFailed{Detail: "full"}, at)
	if len(effects) != 1 || effects[0] != (ArmTimer{At: at.Add(KeepRetry)}) {
		t.Fatalf("effects %+v", effects)
	}
	s, effects = KeepStep(s, Tick{}, at.Add(KeepRetry))
	if _, ok := effects[0].(WriteExitRecord); !ok {
		t.Fatalf("effects %+v", effects)
	}
	if s, _ = KeepStep(s, Recorded{}, at); s.Phase != wire.PhaseEnded {
		t.Fatal("not ended")
	}

	// An init that survives SIGKILL: told as unproven, killed again, no record.
	s, _ = runKeep(t, Begin{}, Started{}, KeepClose{})
	s, effects = KeepStep(s, Tick{}, now.Add(time.Minute))
	if s.Unproven == "" || s.Phase != wire.PhaseStopping || !reflect.DeepEqual(kindsOf(effects), []string{"KillTree", "ArmTimer"}) {
		t.Fatalf("%+v, effects %v", s, kindsOf(effects))
	}
}

func TestSignalNames(t *testing.T) {
	t.Parallel()
	for n := 1; n <= maxSignal; n++ {
		if got, ok := SignalNumber(SignalName(n)); !ok || got != n {
			t.Errorf("signal %d is called %s, which is %d", n, SignalName(n), got)
		}
	}
	for _, name := range []string{"", "SIG", "SIG0", "SIG65", "SIG9", "SIGFOO", "TERM"} {
		if n, ok := SignalNumber(name); ok {
			t.Errorf("%q is signal %d", name, n)
		}
	}
	if SignalName(15) != "SIGTERM" || SignalName(31) != "SIGSYS" || SignalName(40) != "SIG40" {
		t.Error("wrong names")
	}
}
