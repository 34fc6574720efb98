package shim

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stockade-run/stockade/internal/oci"
	"github.com/stockade-run/stockade/internal/process"
)

// runArgs is the command line that starts the container: detached, so that the
// runtime is gone afterwards and the init is inherited by the shim.
func (k *keeper) runArgs() []string {
	args := k.runtime().Command(k.cfg.RuntimeRoot, "--log", filepath.Join(k.dir, runtimeLog), "--log-format", "json",
		"run", "--detach", "--pid-file", filepath.Join(k.dir, pidFile), "--bundle", k.cfg.Bundle)
	args = append(args, k.cfg.Manner.PassReport...)
	if k.cfg.Spec.PTY != nil {
		args = append(args, "--console-socket", consoleSocket)
	}
	return append(args, k.cfg.Container)
}

func (k *keeper) runtime() oci.Runtime {
	return oci.Runtime{Path: k.cfg.Runtime, Manner: k.cfg.Manner}
}

// runtimeEnv is all the environment a runtime gets.
func runtimeEnv() []string {
	return []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
}

// runtimeError says what a runtime said about its failure.
func (l *launching) runtimeError(ws syscall.WaitStatus) error {
	said := lastError(filepath.Join(l.dir, runtimeLog))
	if said == "" && l.ends.errR >= 0 {
		b := make([]byte, runtimeText)
		_ = unix.SetNonblock(l.ends.errR, true)
		if n, err := unix.Read(l.ends.errR, b); err == nil && n > 0 {
			said = strings.TrimSpace(string(b[:n]))
		}
	}
	switch {
	case said != "":
		return fmt.Errorf("the runtime refused: %s", clip(said, runtimeText))
	case ws.Signaled():
		return fmt.Errorf("the runtime was ended by %s and said nothing", process.SignalName(int(ws.Signal())))
	}
	return fmt.Errorf("the runtime exited with code %d and said nothing", ws.ExitStatus())
}

// lastError returns the last error in a runtime's log of JSON lines.
func lastError(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, 64<<10))
	if err != nil {
		return ""
	}
	said := ""
	for line := range bytes.Lines(b) {
		var l struct{ Level, Msg string }
		if json.Unmarshal(line, &l) == nil && l.Level == "error" && l.Msg != "" {
			said = l.Msg
		}
	}
	return said
}

// deleteContainer removes what a runtime keeps of the container, and its
// cgroup, and kills what is left in it. It is bounded; a container that is not
// there is no error.
func (k *keeper) deleteContainer() {
	_, end, err := k.reap.start(k.cfg.Runtime,
		k.runtime().Command(k.cfg.RuntimeRoot, "delete", "--force", k.cfg.Container),
		&syscall.ProcAttr{Dir: "/", Env: runtimeEnv(), Files: []uintptr{k.null, k.null, k.null}})
	if err != nil {
		k.log.Warn("delete the container", "error", err)
		return
	}
	select {
	case ws := <-end:
		if ws.ExitStatus() != 0 {
			k.log.Warn("delete the container", "status", ws.ExitStatus())
		}
	case <-time.After(deletePatience):
		k.log.Warn("delete the container: the runtime does not answer")
	}
	ctx, cancel := context.WithTimeout(context.Background(), killPatience)
	defer cancel()
	if err := k.cgroup.Remove(ctx); err != nil {
		k.log.Warn("remove the cgroup", "error", err)
	}
}
