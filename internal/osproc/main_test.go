package osproc

import (
	"fmt"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/need"
)

// The test binary is also every child of the tests: the keeper, agents that do
// not want to end, and the program that a keeper is refused permission by.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case KeeperCommand:
			os.Exit(KeeperMain())
		case "keeper-denied":
			os.Exit(keeperMain(func(int, unix.Signal) error { return unix.EPERM }))
		}
		if f, ok := helpers[os.Args[1]]; ok {
			f(os.Args[2:])
			os.Exit(0)
		}
	}
	need.Main(m)
}

// again starts this binary as another helper and returns its process.
func again(setsid bool, args ...string) *os.Process {
	p, err := os.StartProcess("/proc/self/exe", append([]string{os.Args[0]}, args...), &os.ProcAttr{
		Env: os.Environ(), Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}, Sys: &syscall.SysProcAttr{Setsid: setsid}})
	if err != nil {
		panic(err)
	}
	return p
}

func forever() { time.Sleep(time.Hour) }

func stubborn() {
	signal.Ignore(unix.SIGTERM, unix.SIGHUP, unix.SIGINT)
}

// say writes a line at once; the tests read who is there.
func say(name string) { fmt.Printf("%s %d\n", name, os.Getpid()) }

var helpers = map[string]func(args []string){
	// obeys ends by SIGTERM.
	"obeys": func([]string) { say("obeys"); forever() },
	// stubborn ignores what can be ignored.
	"stubborn": func([]string) { stubborn(); say("stubborn"); forever() },
	// family is a stubborn child with a stubborn grandchild and one that has left
	// the session.
	"family": func([]string) {
		stubborn()
		again(false, "stubborn")
		again(true, "stubborn")
		say("family")
		forever()
	},
	// orphans ends by itself and leaves a stubborn process in another session, whose
	// parent has gone, and with no variable of ours.
	"orphans": func([]string) {
		p := again(true, "orphaner")
		_, _ = p.Wait()
		say("orphans")
	},
	"orphaner": func([]string) {
		_, err := os.StartProcess("/proc/self/exe", []string{"x", "stubborn"}, &os.ProcAttr{
			Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}, Sys: &syscall.SysProcAttr{Setsid: true}})
		if err != nil {
			panic(err)
		}
	},
	// forker forks for as long as it is let.
	"forker": func([]string) {
		stubborn()
		say("forker")
		for range 300 {
			if p, err := os.StartProcess("/bin/sleep", []string{"sleep", "3600"}, &os.ProcAttr{Sys: &syscall.SysProcAttr{Setsid: true}}); err == nil {
				_ = p.Release()
			}
		}
		say("forked")
		forever()
	},
	// murderer kills its keeper.
	"murderer": func(args []string) {
		if p := again(true, "stubborn"); p == nil {
			return
		}
		_ = unix.Kill(os.Getppid(), unix.SIGKILL)
		forever()
	},
	// lender gives its output to a process that is none of the tree, over a socket, as
	// ssh and tmux do with their masters, and stays.
	"lender": func(args []string) {
		c, err := net.Dial("unix", args[0])
		if err != nil {
			panic(err)
		}
		fmt.Fprintln(os.Stderr, "last words")
		say("lender")
		if _, _, err := c.(*net.UnixConn).WriteMsgUnix([]byte("x"), unix.UnixRights(1, 2), nil); err != nil {
			panic(err)
		}
		forever()
	},
	"exit":   func(args []string) { var n int; fmt.Sscan(args[0], &n); os.Exit(n) },
	"crash":  func([]string) { _ = unix.Kill(os.Getpid(), unix.SIGKILL); forever() },
	"echo":   func(args []string) { fmt.Println(strings.Join(args, "|")) },
	"stderr": func([]string) { fmt.Fprintln(os.Stderr, "api_key=hunter2hunter2\nvalue s3cr3t-value told") },
	"where": func([]string) {
		dir, _ := os.Getwd()
		fmt.Println(dir)
		for _, kv := range os.Environ() {
			fmt.Println(kv)
		}
	},
	"flood": func([]string) {
		line := strings.Repeat("x", 1<<20)
		for {
			if _, err := fmt.Print(line); err != nil {
				return
			}
		}
	},
	"cat": func([]string) {
		buf := make([]byte, 64<<10)
		for {
			n, err := os.Stdin.Read(buf)
			_, _ = os.Stdout.Write(buf[:n])
			if err != nil {
				return
			}
		}
	},
	// caller starts a tree as this package does, says who is in it, and waits to
	// be killed.
	"caller": func([]string) {
		dir, err := os.Open("/")
		if err != nil {
			panic(err)
		}
		p, err := Start(Config{Argv: []string{exe(), "family"}, Dir: dir, Keeper: []string{exe(), KeeperCommand}, Grace: 50 * time.Millisecond})
		if err != nil {
			panic(err)
		}
		for {
			line, err := p.ReadLine()
			if err != nil {
				return
			}
			fmt.Printf("%s\n", line)
		}
	},
	// other becomes another user, whom the keeper may not signal.
	"other": func([]string) {
		uid := os.Geteuid()
		if err := unix.Setresuid(uid, uid, uid); err != nil {
			panic(err)
		}
		stubborn()
		say("other")
		forever()
	},
	// unprivileged runs args[0] as a tree and tells the outcome; it is started as
	// an ordinary user.
	"unprivileged": func(args []string) {
		dir, err := os.Open("/")
		if err != nil {
			panic(err)
		}
		p, err := Start(Config{Argv: args, Dir: dir, Keeper: []string{exe(), KeeperCommand}, Grace: 50 * time.Millisecond, KillWait: 200 * time.Millisecond})
		if err != nil {
			panic(err)
		}
		line, err := p.ReadLine()
		fmt.Printf("%s %v\n", line, err)
		o := p.Stop()
		fmt.Printf("%v %s\n", o.Confirmed, o.Why)
	},
}

func exe() string {
	e, err := os.Executable()
	if err != nil {
		panic(err)
	}
	return e
}
