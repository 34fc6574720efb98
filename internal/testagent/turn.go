package testagent

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
	"unicode/utf8"

	acp "github.com/coder/acp-go-sdk"
)

// maxShown bounds how much of a file or of a command's output is reported.
const maxShown = 64 << 10

// Noise comes in parts of noisePiece bytes, from a seed, so that it is the same
// each time.
const (
	noisePiece = 1024
	noiseSeed  = 7
)

// turn plays the script once.
type turn struct {
	conn    *acp.AgentSideConnection
	session acp.SessionId
	dir     string
	script  Script
	calls   int
}

func (t *turn) play(ctx context.Context) error {
	for i, s := range t.script.Steps {
		if err := t.step(ctx, s); err != nil {
			return fmt.Errorf("step %d: %w", i+1, err)
		}
	}
	return nil
}

func (t *turn) step(ctx context.Context, s Step) error {
	switch {
	case s.Think != "":
		return t.stream(ctx, pieces(s.Think+"\n", t.script.piece()), acp.UpdateAgentThoughtText)
	case s.Say != "":
		return t.stream(ctx, pieces(s.Say+"\n", t.script.piece()), acp.UpdateAgentMessageText)
	case s.Noise > 0:
		return t.noise(ctx, s.Noise)
	case s.Read != "":
		return t.read(ctx, s.Read)
	case s.Edit != nil:
		return t.edit(ctx, *s.Edit)
	default:
		return t.run(ctx, s.Run, s.Exit)
	}
}

// pieces cuts a text into parts of about n bytes, at rune borders.
func pieces(s string, n int) iter.Seq[string] {
	return func(yield func(string) bool) {
		for len(s) > 0 {
			end := min(n, len(s))
			for end < len(s) && !utf8.RuneStart(s[end]) {
				end++
			}
			if !yield(s[:end]) {
				return
			}
			s = s[end:]
		}
	}
}

// noise is total bytes of hexadecimal digits in parts of n.
func noise(total int64, n int) iter.Seq[string] {
	return func(yield func(string) bool) {
		var seed [32]byte
		seed[0] = noiseSeed
		src := rand.NewChaCha8(seed)
		raw := make([]byte, (n+1)/2)
		for total > 0 {
			_, _ = src.Read(raw) // never fails
			part := hex.EncodeToString(raw)
			part = part[:min(int64(n), total)]
			total -= int64(len(part))
			if !yield(part) {
				return
			}
		}
	}
}

// noise sends text as fast as it is taken.
func (t *turn) noise(ctx context.Context, total int64) error {
	for p := range noise(total, noisePiece) {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err := t.update(ctx, acp.UpdateAgentMessageText(p)); err != nil {
			return err
		}
	}
	return nil
}

// stream sends text part by part at the script's pace.
func (t *turn) stream(ctx context.Context, parts iter.Seq[string], update func(string) acp.SessionUpdate) error {
	for p := range parts {
		if err := t.wait(ctx); err != nil {
			return err
		}
		if err := t.update(ctx, update(p)); err != nil {
			return err
		}
	}
	return nil
}

func (t *turn) wait(ctx context.Context) error {
	if t.script.pace() == 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(t.script.pace())
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (t *turn) update(ctx context.Context, u acp.SessionUpdate) error {
	return t.conn.SessionUpdate(ctx, acp.SessionNotification{SessionId: t.session, Update: u})
}

// announce begins a tool call and returns its id.
func (t *turn) announce(ctx context.Context, title string, kind acp.ToolKind, opts ...acp.ToolCallStartOpt) (acp.ToolCallId, error) {
	t.calls++
	id := acp.ToolCallId(fmt.Sprintf("call_%d", t.calls))
	opts = append(opts, acp.WithStartKind(kind), acp.WithStartStatus(acp.ToolCallStatusInProgress))
	return id, t.update(ctx, acp.StartToolCall(id, title, opts...))
}

// finish reports how a tool call ended.
func (t *turn) finish(ctx context.Context, id acp.ToolCallId, failed bool, text string) error {
	status := acp.ToolCallStatusCompleted
	if failed {
		status = acp.ToolCallStatusFailed
	}
	return t.update(ctx, acp.UpdateToolCall(id, acp.WithUpdateStatus(status),
		acp.WithUpdateContent([]acp.ToolCallContent{acp.ToolContent(acp.TextBlock(text))})))
}

func (t *turn) read(ctx context.Context, path string) error {
	id, err := t.announce(ctx, "Read "+path, acp.ToolKindRead, acp.WithStartLocations([]acp.ToolCallLocation{{Path: path}}))
	if err != nil {
		return err
	}
	b, err := t.file(path, func(r *os.Root) ([]byte, error) { return r.ReadFile(path) })
	if err != nil {
		return errors.Join(err, t.finish(ctx, id, true, err.Error()))
	}
	return t.finish(ctx, id, false, string(b[:min(len(b), maxShown)]))
}

// file does something with a path that cannot leave the working directory.
func (t *turn) file(path string, do func(*os.Root) ([]byte, error)) ([]byte, error) {
	root, err := os.OpenRoot(t.dir)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	b, err := do(root)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return b, nil
}

func (t *turn) edit(ctx context.Context, e Edit) error {
	title := "Edit " + e.Path
	diff := []acp.ToolCallContent{acp.ToolDiffContent(e.Path, e.New, e.Old)}
	id, err := t.announce(ctx, title, acp.ToolKindEdit, acp.WithStartContent(diff))
	if err != nil {
		return err
	}
	answer, err := t.conn.RequestPermission(ctx, acp.RequestPermissionRequest{
		SessionId: t.session,
		ToolCall:  acp.ToolCallUpdate{ToolCallId: id, Title: &title, Content: diff},
		Options: []acp.PermissionOption{
			{Kind: acp.PermissionOptionKindAllowOnce, Name: "Allow", OptionId: "allow"},
			{Kind: acp.PermissionOptionKindRejectOnce, Name: "Reject", OptionId: "reject"},
		},
	})
	if err != nil {
		return fmt.Errorf("asking for permission: %w", err)
	}
	if answer.Outcome.Selected == nil || answer.Outcome.Selected.OptionId != "allow" {
		return t.finish(ctx, id, true, "not allowed")
	}
	_, err = t.file(e.Path, func(r *os.Root) ([]byte, error) {
		b, err := r.ReadFile(e.Path)
		if err != nil {
			return nil, err
		}
		if n := bytes.Count(b, []byte(e.Old)); n != 1 {
			return nil, fmt.Errorf("the text to replace occurs %d times, not once", n)
		}
		info, err := r.Stat(e.Path)
		if err != nil {
			return nil, err
		}
		return nil, r.WriteFile(e.Path, bytes.Replace(b, []byte(e.Old), []byte(e.New), 1), info.Mode().Perm())
	})
	if err != nil {
		return errors.Join(err, t.finish(ctx, id, true, err.Error()))
	}
	return t.finish(ctx, id, false, "edited")
}

func (t *turn) run(ctx context.Context, line string, want int) error {
	id, err := t.announce(ctx, line, acp.ToolKindExecute, acp.WithStartRawInput(map[string]any{"command": line}))
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "sh", "-c", line)
	cmd.Dir = t.dir
	var out bounded
	cmd.Stdout, cmd.Stderr = &out, &out
	// All it started ends with it when the prompt is cancelled.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	runErr := cmd.Run()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	code := cmd.ProcessState.ExitCode() // -1 without one
	if runErr != nil && code < 0 {
		return errors.Join(runErr, t.finish(ctx, id, true, runErr.Error()))
	}
	if err := t.finish(ctx, id, code != 0, fmt.Sprintf("%sexit code %d", out.text(), code)); err != nil {
		return err
	}
	if code != want {
		return fmt.Errorf("%q exited with %d, the script expects %d", line, code, want)
	}
	return nil
}

// bounded keeps the beginning of what is written to it.
type bounded struct {
	b   []byte
	cut bool
}

func (b *bounded) Write(p []byte) (int, error) {
	n := min(len(p), maxShown-len(b.b))
	b.b = append(b.b, p[:n]...)
	b.cut = b.cut || n < len(p)
	return len(p), nil
}

func (b *bounded) text() string {
	s := strings.ToValidUTF8(string(b.b), "\uFFFD")
	if b.cut {
		s += "\n… (more was cut off)"
	}
	if s != "" && !strings.HasSuffix(s, "\n") {
		s += "\n"
	}
	return s
}
