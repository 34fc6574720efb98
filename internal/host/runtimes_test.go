package host_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/host/hosttest"
	"github.com/stockade-run/stockade/internal/need"
	"github.com/stockade-run/stockade/internal/netns"
	"github.com/stockade-run/stockade/internal/wire"
)

// Whatever the runtime, a process sees the box and nothing else, and reaches
// what listens on the box's own loopback device, the gateway above all.
func TestABoxIsTheSameOverEveryRuntime(t *testing.T) { need.EachRuntime(t, aBoxIsTheSame) }

func aBoxIsTheSame(t *testing.T, runtime string) {
	t.Parallel()
	h := hosttest.NewOver(t, runtime)
	box := h.Box()
	l, err := netns.Listen(filepath.Join(h.Dir, "boxes", box, "netns"), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			fmt.Fprintln(c, "the gateway")
			c.Close()
		}
	}()
	_, port, _ := strings.Cut(l.Addr().String(), ":")
	// Another process of the box, on its loopback device and in its workspace.
	server := h.Run(hosttest.Spec(box, "/usr/bin/perl", "-MIO::Socket::INET", "-MIO::Socket::UNIX", "-e",
		`$u = IO::Socket::UNIX->new(Listen => 1, Local => "/workspace/socket") or die;
		fork or do { while ($c = $u->accept) { print $c "by a socket\n"; close $c } };
		$l = IO::Socket::INET->new(Listen => 1, LocalAddr => "127.0.0.1:8377") or die; $| = 1; print "up\n"; while ($c = $l->accept) { print $c "a neighbour\n"; close $c }`))
	hosttest.Eventually(t, "the server is up", func() bool {
		st, err := h.Client().Proc(t.Context(), server.ID)
		return err == nil && st.Log.Next == 3
	})
	spec := h.Run(hosttest.Spec(box, "/bin/bash", "-c", `
		exec 3<>/dev/tcp/127.0.0.1/`+port+` && cat <&3
		exec 3<>/dev/tcp/127.0.0.1/8377 && cat <&3
		/usr/bin/perl -MIO::Socket::UNIX -e '$c = IO::Socket::UNIX->new(Peer => "/workspace/socket") or print "no socket\n"; print <$c> if $c'
		(exec 3<>/dev/tcp/192.0.2.1/80) 2>/dev/null || echo nowhere else
		grep -c : /proc/net/dev
		id -u; id -g; grep -E '^Cap(Eff|Bnd)' /proc/self/status | cut -f2; hostname
		for f in / /usr /bin /etc /proc/sys/kernel/hostname /.stockade/init; do [ -w $f ] && echo $f can be written; done
		echo x > /workspace/x && echo x > /tmp/x && echo x > /dev/shm/x && rm /workspace/x
		mknod /tmp/null c 1 3 2>/dev/null && echo a device
		mount -t tmpfs none /tmp 2>/dev/null && echo a mount
		ls /proc/1/root 2>/dev/null
		ls /sys | grep -v -x -E 'block|bus|class|dev|devices|firmware|fs|kernel|module|power'
		ls /dev | grep -v -x -E 'core|char|fuse' | sort | tr '\n' ' '; tr '\0' ' ' </proc/1/cmdline | head -1 | cut -d' ' -f1,2`))
	out, errs := h.Output(spec.ID)
	// Every process of a box is a sandbox of its own over runsc, and a socket file
	// means something only to the kernel that made it.
	socket := "by a socket"
	if filepath.Base(runtime) == "runsc" {
		socket = "no socket"
	}
	want := "the gateway\na neighbour\n" + socket + "\nnowhere else\n1\n1000\n1000\n0000000000000000\n0000000000000000\nbox\n" +
		"fd full null ptmx pts random shm stderr stdin stdout tty urandom zero /.stockade/init init\n"
	// runsc's kernel has a /sys and a /dev/fuse of its own; with the others /sys is
	// an empty directory.
	if string(out) != want {
		t.Errorf("it says\n%s\nand complains\n%s\nwant\n%s", out, errs, want)
	}
	h.Phase(spec.ID, wire.PhaseEnded)
	if st, err := h.Client().CloseProc(t.Context(), server.ID, wire.Close{}); err != nil || st.Proof == nil {
		t.Errorf("close: %+v, %v", st, err)
	}
}

func TestLimitsHoldOverEveryRuntime(t *testing.T) { need.EachRuntime(t, limitsHold) }

func limitsHold(t *testing.T, runtime string) {
	t.Parallel()
	h := hosttest.NewOver(t, runtime)
	box := h.Box()
	forks := hosttest.Sh(box, `i=0; while [ $i -lt 100 ]; do sleep 100 & i=$((i+1)); done; echo all`)
	forks.Pids = 40
	forks = h.Run(forks)
	st := h.Phase(forks.ID, wire.PhaseEnded)
	if _, errs := h.Output(forks.ID); !exited(st, 2) || !strings.Contains(string(errs), "Cannot fork") {
		t.Errorf("a process that may have 40 ended with %+v: %s", st.Exit, errs)
	}
	eats := hosttest.Spec(box, "tail", "/dev/zero")
	eats.MemoryBytes = 192 << 20
	eats = h.Run(eats)
	if st := h.Phase(eats.ID, wire.PhaseEnded); st.Exit.Kind != api.ExitOOM || st.Proof == nil {
		t.Errorf("a process that may have 192 MiB ended with %+v", st.Exit)
	}
}

// Everything that a start brings is in the process's control group, in every
// hierarchy, so that an empty group proves that nothing of it is left.
func TestEverythingIsInTheGroup(t *testing.T) { need.EachRuntime(t, everythingIsInTheGroup) }

func everythingIsInTheGroup(t *testing.T, runtime string) {
	t.Parallel()
	h := hosttest.NewOver(t, runtime)
	box := h.Box()
	spec := h.Run(hosttest.Sh(box, "echo up; sleep 1000 & wait"))
	hosttest.Eventually(t, "it is up", func() bool {
		st, err := h.Client().Proc(t.Context(), spec.ID)
		return err == nil && st.Log.Next == 3
	})
	shim := h.Shim(spec.ID)
	tree := descendants(t, shim)
	if len(tree) < 2 {
		t.Fatalf("the shim %d has the descendants %v", shim, tree)
	}
	for _, pid := range tree {
		groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(strings.TrimSpace(string(groups))) {
			if !strings.HasSuffix(strings.TrimSpace(line), "/"+box+"/"+spec.ID) {
				t.Errorf("process %d is in %s", pid, line)
			}
		}
	}
	if st, err := h.Client().CloseProc(t.Context(), spec.ID, wire.Close{}); err != nil || st.Proof == nil {
		t.Errorf("close: %+v, %v", st, err)
	}
	for _, pid := range tree {
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); err == nil {
			t.Errorf("process %d is still there after the proof", pid)
		}
	}
}

// descendants returns the processes below one, at this moment.
func descendants(t *testing.T, top int) []int {
	t.Helper()
	above := map[int]int{}
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range stats {
		b, _ := os.ReadFile(file)
		if i := strings.LastIndexByte(string(b), ')'); i > 0 {
			var state string
			var parent int
			if _, err := fmt.Sscan(string(b[i+1:]), &state, &parent); err == nil {
				above[atoi(t, filepath.Base(filepath.Dir(file)))] = parent
			}
		}
	}
	var all []int
	for pid := range above {
		for at := above[pid]; at > 0; at = above[at] {
			if at == top {
				all = append(all, pid)
				break
			}
		}
	}
	return all
}
