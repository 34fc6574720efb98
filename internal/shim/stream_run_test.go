package shim

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/cgroup"
	"github.com/stockade-run/stockade/internal/errdefs"
	"github.com/stockade-run/stockade/internal/wire"
)

// Not one of 64 MiB of random bytes is lost or changed, whatever the streams.
func TestOutputIsExact(t *testing.T) { each(t, outputIsExact) }

func outputIsExact(t *over) {
	t.Parallel()
	const n = 64 << 20
	p := newProc(t, sh(fmt.Sprintf(`mkfifo /tmp/f; sha256sum </tmp/f >&2 & head -c %d /dev/urandom | tee /tmp/f; wait`, n))).start()
	p.quiescent()
	out, errs := p.output()
	if len(out) != n {
		t.Fatalf("%d bytes, want %d", len(out), n)
	}
	sum := sha256.Sum256(out)
	if want := strings.Fields(string(errs))[0]; hex.EncodeToString(sum[:]) != want {
		t.Errorf("digest %x, the child computed %s", sum, want)
	}
}

// A child may close its outputs and live on.
func TestClosedOutputs(t *testing.T) { each(t, closedOutputs) }

func closedOutputs(t *over) {
	t.Parallel()
	p := newProc(t, sh(`echo last; exec >&- 2>&-; read x; exit 8`), with(stdin)).start()
	st := p.until(-1, "the end of the log", func(st wire.ProcState) bool { return st.Log.EOF })
	if st.Phase == wire.PhaseStopping || st.Exit != nil {
		t.Fatalf("%+v", st)
	}
	if _, err := p.client.WriteStdin(p.ctx(), 0, []byte("go\n"), true); err != nil {
		t.Fatal(err)
	}
	p.wantExit(p.quiescent(), api.ExitExited, 8, "")
}

// The pipes are the child's own: it may open them again by name.
func TestOutputsCanBeOpenedByName(t *testing.T) { each(t, outputsCanBeOpenedByName) }

func outputsCanBeOpenedByName(t *over) {
	t.Parallel()
	p := newProc(t, sh(`echo a >/dev/stdout; echo b >/dev/stderr; cat /dev/stdin`), with(stdin)).start()
	_, err := p.client.WriteStdin(p.ctx(), 0, []byte("c\n"), true)
	check(t, err)
	p.wantExit(p.quiescent(), api.ExitExited, 0, "")
	if out, errs := p.output(); string(out) != "a\nc\n" || string(errs) != "b\n" {
		t.Errorf("%q %q", out, errs)
	}
}

// At the cap under block the child waits, nothing is lost, and an
// acknowledgement lets it go on.
func TestBlockedLog(t *testing.T) { each(t, blockedLog) }

func blockedLog(t *over) {
	t.Parallel()
	const n = 8 << 20
	p := newProc(t, sh(fmt.Sprintf(`head -c %d /dev/zero; echo end`, n)), overflow(api.OverflowBlock, 1<<20)).start()
	st := p.until(0, "blocked", func(st wire.ProcState) bool { return st.Log.Blocked })
	if st.Log.Oldest != 0 || st.Phase == wire.PhaseEnded {
		t.Fatalf("%+v", st)
	}
	wantCode(t, p.client.Ack(p.ctx(), st.Log.Next+1), errdefs.Invalid)
	var next int64
	p.until(0, "the end", func(st wire.ProcState) bool {
		if st.Phase != wire.PhaseEnded {
			check(t, p.client.Ack(p.ctx(), st.Log.Next))
		}
		next = st.Log.Next
		return st.Phase == wire.PhaseEnded
	})
	if next != n+4 {
		t.Errorf("%d bytes came out, want %d", next, n+4)
	}
}

// A close does not wait for a reader that never comes.
func TestCloseWhileBlocked(t *testing.T) {
	t.Parallel()
	for _, mode := range []option{with(func(*Config) {}), with(terminal)} {
		p := newProc(t, sh(`cat /dev/zero`), overflow(api.OverflowBlock, 1<<20), mode).start()
		p.until(0, "blocked", func(st wire.ProcState) bool { return st.Log.Blocked })
		if st := p.close(0); st.Exit.Kind != api.ExitSignalled {
			t.Errorf("exit %+v", st.Exit)
		}
	}
}

// Who was given an output of the command, and goes on writing to it after the
// command's end, can neither keep it from ending nor fill the disk.
func TestOutputsHeldByAnOutsider(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		mode option
	}{{"pipe", with(stdin)}, {"terminal", with(terminal)}} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			const most = 1 << 20
			p := newProc(t, sh(`echo begun; read x; exit 3`), overflow(api.OverflowBlock, most), tc.mode).start()
			p.says("begun")
			flood(t, p.outputOfCommand())
			p.until(0, "blocked", func(st wire.ProcState) bool { return st.Log.Blocked })
			_, err := p.client.WriteStdin(p.ctx(), 0, []byte("x\n"), false)
			check(t, err)
			st := p.quiescent()
			p.wantExit(st, api.ExitExited, 3, "")
			if st.Log.Next > most+8<<20 {
				t.Errorf("the log has %d bytes, its cap is %d", st.Log.Next, most)
			}
		})
	}
}

// outputOfCommand opens the command's standard output, as somebody does to whom
// it was passed.
func (p *proc) outputOfCommand() int {
	p.t.Helper()
	pids, err := cgroup.New("", p.cfg.Cgroup).Procs()
	check(p.t, err)
	for _, pid := range pids {
		path := fmt.Sprintf("/proc/%d/fd/1", pid)
		if to, err := os.Readlink(path); err == nil && to != "/dev/null" {
			fd, err := unix.Open(path, unix.O_WRONLY|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
			check(p.t, err)
			return fd
		}
	}
	p.t.Fatal("no command is there")
	return -1
}

func TestDroppedOldest(t *testing.T) {
	t.Parallel()
	const n = 8 << 20
	p := newProc(t, sh(fmt.Sprintf(`head -c %d /dev/zero`, n)), overflow(api.OverflowDropOldest, 1<<20)).start()
	st := p.quiescent()
	if st.Log.Next != n || st.Log.Oldest == 0 || n-st.Log.Oldest > 1<<20 {
		t.Errorf("log %+v", st.Log)
	}
}

// On a full disk the tree is stopped and the exit says why, and is no success
// even if the command takes the request to end for one.
func TestDiskFull(t *testing.T) {
	t.Parallel()
	p := newProc(t, sh(`trap 'exit 0' TERM; cat /dev/zero; sleep 1000`))
	moved := filepath.Join(filepath.Dir(p.dir), "moved")
	check(t, os.Rename(p.dir, moved))
	check(t, os.Mkdir(p.dir, 0o755))
	check(t, unix.Mount("tmpfs", p.dir, "tmpfs", 0, "size=4m,mode=0711"))
	p.last = func() { check(t, unix.Unmount(p.dir, unix.MNT_DETACH)) }
	check(t, os.CopyFS(p.dir, os.DirFS(moved)))
	p.start()
	st := p.quiescent()
	if st.Exit.Kind != api.ExitUnknown || !strings.Contains(st.Exit.Detail, "disk is full") || st.Log.Failure == "" {
		t.Errorf("exit %+v, log %+v", st.Exit, st.Log)
	}
	if out, _ := p.output(); int64(len(out)) != st.Log.Next || st.Log.Next == 0 {
		t.Errorf("%d bytes kept, the log says %d", len(out), st.Log.Next)
	}
}

// As long as the exit record cannot be written nobody claims an end; it follows
// as soon as it can be written.
func TestExitRecordCannotBeWritten(t *testing.T) {
	t.Parallel()
	p := newProc(t, sh(`exit 0`))
	inTheWay := filepath.Join(p.dir, exitFile+".tmp")
	check(t, os.Mkdir(inTheWay, 0o700))
	check(t, os.WriteFile(filepath.Join(inTheWay, "x"), nil, 0o600))
	p.start()
	st := p.until(-1, "the failed record", func(st wire.ProcState) bool { return strings.Contains(st.Unproven, "exit record") })
	if st.Phase != wire.PhaseStopping || st.Exit != nil || st.Proof != nil {
		t.Errorf("%+v", st)
	}
	again, err := p.client.Close(p.ctx(), wire.Close{Reason: "test"})
	if err != nil || again.Phase == wire.PhaseEnded || again.Unproven == "" {
		t.Errorf("close: %+v %v", again, err)
	}
	wantCode(t, p.client.Forget(p.ctx()), errdefs.Conflict)
	_, err = ReadExit(p.dir)
	wantCode(t, err, errdefs.NotFound)
	check(t, os.RemoveAll(inTheWay))
	p.wantExit(p.quiescent(), api.ExitExited, 0, "")
}

func TestStdinIsExact(t *testing.T) { each(t, stdinIsExact) }

func stdinIsExact(t *over) {
	t.Parallel()
	data := make([]byte, 5<<20)
	for i := range data {
		data[i] = byte(rand.Uint32())
	}
	p := newProc(t, []string{"sha256sum"}, with(stdin)).start()
	rng := rand.New(rand.NewPCG(1, 2))
	accepted := int64(0)
	for accepted < int64(len(data)) {
		// Behind, exact, or ahead; long or short; often repeated.
		offset := max(0, accepted-rng.Int64N(70_000))
		end := min(int64(len(data)), accepted+rng.Int64N(200_000))
		if rng.IntN(10) == 0 {
			_, err := p.client.WriteStdin(p.ctx(), accepted+1, data[:1], false)
			if !errdefs.Is(err, errdefs.Conflict) || !strings.Contains(err.Error(), fmt.Sprint(accepted)) {
				t.Fatalf("ahead: %v", err)
			}
		}
		st, err := p.client.WriteStdin(p.ctx(), offset, data[offset:end], false)
		if errdefs.Is(err, errdefs.Exhausted) {
			continue
		}
		check(t, err)
		if st.Accepted < accepted || st.Accepted > end {
			t.Fatalf("accepted %d after %d, the write ended at %d", st.Accepted, accepted, end)
		}
		accepted = st.Accepted
	}
	for range 2 { // EOF may be repeated as well
		st, err := p.client.WriteStdin(p.ctx(), accepted, nil, true)
		if err != nil || !st.EOF {
			t.Fatalf("%+v %v", st, err)
		}
	}
	p.wantExit(p.quiescent(), api.ExitExited, 0, "")
	out, _ := p.output()
	sum := sha256.Sum256(data)
	if got := strings.Fields(string(out))[0]; got != hex.EncodeToString(sum[:]) {
		t.Errorf("the child read %s, want %x", got, sum)
	}
	// Repetitions are answered for ever, news are not.
	if st, err := p.client.WriteStdin(p.ctx(), 0, data[:100], false); err != nil || st.Accepted != accepted {
		t.Errorf("%+v %v", st, err)
	}
	_, err := p.client.WriteStdin(p.ctx(), accepted, []byte("x"), false)
	wantCode(t, err, errdefs.Conflict)
}

func TestStdinRefusals(t *testing.T) {
	t.Parallel()
	p := newProc(t, sh(`echo ready; sleep 1000`), with(stdin)).start()
	p.says("ready")
	write := func(offset int64, n int, eof bool) (api.StdinState, error) {
		return p.client.WriteStdin(p.ctx(), offset, make([]byte, n), eof)
	}
	_, err := write(-1, 1, false)
	wantCode(t, err, errdefs.Invalid)
	_, err = write(api.MaxOffset+1, 1, false)
	wantCode(t, err, errdefs.Invalid)
	_, err = write(1, 1, false)
	wantCode(t, err, errdefs.Conflict)
	// The child does not read: the window and the pipe fill, then it is said.
	var accepted int64
	for {
		st, err := write(accepted, 300_000, false)
		if errdefs.Is(err, errdefs.Exhausted) {
			if e, ok := err.(*errdefs.Error); !ok || e.Detail["accepted"] != fmt.Sprint(accepted) || e.Detail["window_bytes"] != "0" {
				// The writer may have made room in the meantime.
				t.Logf("facts %v", e.Detail)
			}
			break
		}
		check(t, err)
		accepted = st.Accepted
	}
	if accepted < StdinWindow || accepted > StdinWindow+(128<<10) {
		t.Errorf("accepted %d for a child that does not read", accepted)
	}
	_, err = write(accepted-10, 5, true)
	wantCode(t, err, errdefs.Conflict)
	st, err := write(accepted, 0, true)
	if err != nil || !st.EOF {
		t.Fatalf("%+v %v", st, err)
	}
	_, err = write(accepted, 1, false)
	wantCode(t, err, errdefs.Conflict)
	if _, err = write(accepted-1, 1, true); err != nil { // the same again
		t.Error(err)
	}
	p.close(0)

	none := newProc(t, sh(`cat; echo end; sleep 1000`)).start()
	none.says("end") // /dev/null is at its end at once
	_, err = none.client.WriteStdin(none.ctx(), 0, []byte("x"), false)
	wantCode(t, err, errdefs.Conflict)
}

func TestChildClosedItsInput(t *testing.T) { each(t, childClosedItsInput) }

func childClosedItsInput(t *over) {
	t.Parallel()
	p := newProc(t, sh(`head -c 3; exec <&-; echo closed; sleep 1000`), with(stdin)).start()
	_, err := p.client.WriteStdin(p.ctx(), 0, []byte("abc"), false)
	check(t, err)
	p.says("closed")
	// For a moment after its start the runtime and init still hold the pipe, and
	// what is written then is accepted.
	accepted := int64(3)
	for {
		st, err := p.client.WriteStdin(p.ctx(), accepted, []byte("d"), false)
		if err != nil {
			wantCode(t, err, errdefs.Conflict)
			if !strings.Contains(err.Error(), "closed its input at offset ") {
				t.Error(err)
			}
			return
		}
		accepted = st.Accepted
	}
}

// What the child starts with is what it was given, and no more.
func TestChildStartsClean(t *testing.T) { each(t, childStartsClean) }

func childStartsClean(t *over) {
	t.Parallel()
	script := `echo fds $(ls /proc/self/fd | grep -v '^3$' | tr '\n' ' '); grep -E '^(SigBlk|SigIgn|CapEff|NoNewPrivs)' /proc/self/status; env | sort | tr '\n' ' '; echo; echo pid $$;
		cat /proc/1/environ >/dev/null 2>&1 || echo init is closed; ls /proc/1/fd >/dev/null 2>&1 || echo its files too; kill -0 1 && echo one may signal`
	p := newProc(t, sh(script)).start()
	p.quiescent()
	out, _ := p.output()
	wants := []string{"fds 0 1 2", "CapEff:\t0000000000000000", "NoNewPrivs:\t1", "HOME=/tmp PATH=/usr/bin:/bin PWD=/ ", "init is closed"}
	// The /proc of runsc's kernel has no line for signal masks, and lists the
	// numbers of another's descriptors; it lets nobody follow or open them
	// (TestReportCannotBeForged).
	if !manner(t.runtime).OwnKernel {
		wants = append(wants, "SigBlk:\t0000000000000000", "SigIgn:\t0000000000000000", "its files too")
	}
	for _, want := range wants {
		if !strings.Contains(string(out), want) {
			t.Errorf("lacks %q:\n%s", want, out)
		}
	}
}

// A tenant cannot end its process with a report of its own.
func TestReportCannotBeForged(t *testing.T) { each(t, reportCannotBeForged) }

func reportCannotBeForged(t *over) {
	t.Parallel()
	p := newProc(t, sh(`for f in /proc/1/fd/3 /proc/self/fd/3; do echo '{"kind":"exited","code":0}' > $f; done 2>/dev/null; kill -KILL 1; kill -TERM 1; exit 42`)).start()
	st := p.quiescent()
	if st.Exit.Kind == api.ExitExited && *st.Exit.Code == 0 {
		t.Fatalf("exit %+v", st.Exit)
	}
}

func TestTerminal(t *testing.T) { each(t, terminalTest) }

func terminalTest(t *over) {
	t.Parallel()
	p := newProc(t, sh(`stty size; tty -s && echo is a terminal; while read line; do echo "got $line"; done; echo end; exit 3`), with(terminal)).start()
	p.says("24 80\r\nis a terminal")
	p.typed("one\n")
	p.says("got one")
	st, err := p.client.State(p.ctx())
	check(t, err)
	_, err = p.client.WriteStdin(p.ctx(), st.Stdin.Accepted, nil, true) // ^D
	check(t, err)
	p.wantExit(p.quiescent(), api.ExitExited, 3, "")
	if out, errs := p.output(); len(errs) > 0 || !strings.HasSuffix(string(out), "end\r\n") {
		t.Errorf("%q %q", out, errs)
	}
	wantCode(t, p.client.Resize(p.ctx(), api.Winsize{Rows: 40, Cols: 120}), errdefs.Conflict)
}

func TestResize(t *testing.T) { each(t, resize) }

func resize(t *over) {
	t.Parallel()
	p := newProc(t, sh(`trap 'stty size; exit 0' WINCH; echo ready; while :; do sleep 0.02; done`), with(terminal)).start()
	p.says("ready")
	wantCode(t, p.client.Resize(p.ctx(), api.Winsize{Rows: 0, Cols: 120}), errdefs.Invalid)
	check(t, p.client.Resize(p.ctx(), api.Winsize{Rows: 40, Cols: 120}))
	p.wantExit(p.quiescent(), api.ExitExited, 0, "")
	if out, _ := p.output(); !strings.Contains(string(out), "40 120") {
		t.Errorf("%q", out)
	}
	pipes := newProc(t, sh(`sleep 1000`)).start()
	wantCode(t, pipes.client.Resize(p.ctx(), api.Winsize{Rows: 40, Cols: 120}), errdefs.Conflict)
}

func (p *proc) typed(s string) {
	p.t.Helper()
	st, err := p.client.State(p.ctx())
	check(p.t, err)
	_, err = p.client.WriteStdin(p.ctx(), st.Stdin.Accepted, []byte(s), false)
	check(p.t, err)
}

func TestEOFInTheMiddleOfALine(t *testing.T) { each(t, eofInTheMiddleOfALine) }

func eofInTheMiddleOfALine(t *over) {
	t.Parallel()
	p := newProc(t, sh(`cat >/tmp/in; wc -c </tmp/in`), with(terminal)).start()
	_, err := p.client.WriteStdin(p.ctx(), 0, []byte("one\ntwo"), true)
	check(t, err)
	p.quiescent()
	if out, _ := p.output(); !strings.Contains(string(out), "7\r\n") {
		t.Errorf("%q", out)
	}
}

func TestControlCharacters(t *testing.T) { each(t, controlCharacters) }

func controlCharacters(t *over) {
	t.Parallel()
	// Ctrl-C reaches the foreground process group: the command, and a job of a
	// shell that has job control.
	p := newProc(t, []string{"cat"}, with(terminal)).start()
	p.typed("ready\n")
	p.says("ready\r\nready\r\n") // the terminal's echo, and the command's
	p.typed("\x03")
	p.wantExit(p.quiescent(), api.ExitSignalled, 0, "SIGINT")

	p = newProc(t, []string{"bash", "--norc", "-i"}, with(terminal)).start()
	p.typed("cat\nready\n")
	p.says("$ cat\r\nready\r\n")
	p.typed("\x03") // which also throws away what was typed and not read
	p.until(0, "the prompt", func(wire.ProcState) bool {
		out, _ := p.output()
		_, after, ok := strings.Cut(string(out), "^C")
		return ok && strings.HasSuffix(after, "$ ")
	})
	p.typed("exit 5\n")
	p.wantExit(p.quiescent(), api.ExitExited, 5, "")

	// Ctrl-Z finds no shell above the command and has no effect.
	p = newProc(t, sh(`echo ready; read x; exit 7`), with(terminal)).start()
	p.says("ready")
	p.typed("\x1a")
	p.typed("x\n")
	p.wantExit(p.quiescent(), api.ExitExited, 7, "")
}

// The last output of a command on a terminal is not lost when its session ends.
func TestTerminalOutputIsExact(t *testing.T) { each(t, terminalOutputIsExact) }

func terminalOutputIsExact(t *over) {
	t.Parallel()
	for i := range 8 {
		t.Run(fmt.Sprint(i), func(t *over) {
			t.Parallel()
			p := newProc(t, sh(`seq 1 60000; exit 2`), with(terminal)).start()
			p.wantExit(p.quiescent(), api.ExitExited, 2, "")
			out, _ := p.output()
			var want bytes.Buffer
			for i := 1; i <= 60000; i++ {
				fmt.Fprintf(&want, "%d\r\n", i)
			}
			if !bytes.Equal(out, want.Bytes()) {
				t.Errorf("%d bytes, want %d", len(out), want.Len())
			}
		})
	}
}

// A socket's path may be longer than the kernel takes.
func TestLongDirectory(t *testing.T) {
	t.Parallel()
	p := newProc(t, sh(`exit 4`), with(terminal))
	deep := filepath.Join(filepath.Dir(p.dir), strings.Repeat("d", 120))
	check(t, os.Rename(p.dir, deep))
	p.dir = deep
	p.cfg.Bundle = filepath.Join(deep, "bundle")
	check(t, WriteConfig(p.dir, p.cfg))
	p.client = NewClient(p.dir)
	p.start()
	p.wantExit(p.quiescent(), api.ExitExited, 4, "")
}
