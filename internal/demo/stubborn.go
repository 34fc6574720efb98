package demo

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"encoding/json"
	"io"
	"strings"
	"time"

	"github.com/stockade-run/stockade/client"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// stubbornScript is a process that ignores SIGTERM, with a grandchild in a
// session of its own that does so as well and holds none of its pipes.
const stubbornScript = `trap '' TERM HUP INT
setsid sh -c 'trap "" TERM HUP INT; echo "grandchild: in a session of my own, deaf to SIGTERM"; exec sleep 100000 <&- >&- 2>&-' &
sleep 0.1
echo 'child: deaf to SIGTERM, too'
while :; do sleep 1; done
`

// stubborn ends a process that does not want to end and checks the proof.
func (s *story) stubborn(ctx context.Context) error {
	s.say.chapter("A process that does not want to end")
	s.say.step("Starting a process and a grandchild that has left its session; both ignore SIGTERM")
	p, err := s.task.Open(ctx, client.OpenRequest{RequestID: "demo-stubborn", Argv: []string{"sh", "-c", stubbornScript}})
	if err != nil {
		return err
	}
	f := follow(ctx, p)
	defer f.stop()
	if err := s.hear(f, "grandchild: ", "child: "); err != nil {
		return err
	}
	s.say.step("Closing it: SIGTERM, %s of grace, then SIGKILL for all of it", closeGrace)
	grace := closeGrace.Milliseconds()
	began := time.Now()
	res, err := p.Close(ctx, client.CloseRequest{Reason: "the demo is done with it", GraceMillis: &grace})
	if err != nil {
		return err
	}
	took := time.Since(began)
	if !res.Quiescent || res.Receipt == nil {
		return errdefs.New(errdefs.Internal, "the process could not be proven gone: %s", res.Process.State)
	}
	s.say.note("answered after %d ms: %d ms of grace and %d ms more", took.Milliseconds(), grace, (took - closeGrace).Milliseconds())
	r := *res.Receipt
	if err := verify(r, p.Handle()); err != nil {
		return err
	}
	s.say.note("receipt   %s", r.ID)
	s.say.note("  what    the tree of %s is empty, generation %d", r.Handle, r.Generation)
	s.say.note("  method  %s: %s", r.Method, methodText(r.Method))
	s.say.note("  where   host %s, boot %s", r.Host, r.BootID)
	s.say.note("  when    %s", r.EmptyAt.Format(time.RFC3339Nano))
	if r.Exit != nil {
		s.say.note("  exit    %s", exitText(*r.Exit))
	}
	again, err := p.Receipt(ctx)
	if err != nil {
		return err
	}
	if !bytes.Equal(again.Payload, r.Payload) || !bytes.Equal(again.Signature, r.Signature) {
		return errdefs.New(errdefs.Internal, "asked for again, the receipt is another one")
	}
	s.say.proven("the signature is good (Ed25519), and the receipt can be asked for again")
	return nil
}

// hear prints lines of the output until each of the beginnings has come.
func (s *story) hear(r io.Reader, beginnings ...string) error {
	var all []byte
	buf := make([]byte, 4096)
	for {
		n, err := r.Read(buf)
		all = append(all, buf[:n]...)
		s.say.words(false, string(buf[:n]))
		missing := 0
		for _, b := range beginnings {
			if !strings.Contains("\n"+string(all), "\n"+b) {
				missing++
			}
		}
		if missing == 0 && bytes.HasSuffix(all, []byte("\n")) {
			return nil
		}
		if err != nil {
			return errdefs.Wrap(err, errdefs.Internal, "the process ended too early")
		}
	}
}

// verify checks a receipt the way anyone can who holds one: the signature, and
// that what is signed speaks of this process.
func verify(r client.Receipt, handle string) error {
	if len(r.PublicKey) != ed25519.PublicKeySize || !ed25519.Verify(r.PublicKey, r.Payload, r.Signature) {
		return errdefs.New(errdefs.Internal, "the signature of the receipt is not good")
	}
	var signed struct {
		ID      string    `json:"id"`
		Handle  string    `json:"handle"`
		Method  string    `json:"method"`
		EmptyAt time.Time `json:"empty_at"`
	}
	if err := json.Unmarshal(r.Payload, &signed); err != nil {
		return errdefs.Wrap(err, errdefs.Internal, "what the receipt signs cannot be read")
	}
	if signed.Handle != handle || signed.ID != r.ID || r.Handle != handle || signed.Method != r.Method || !signed.EmptyAt.Equal(r.EmptyAt) {
		return errdefs.New(errdefs.Internal, "the receipt signs something else than it says: %s", r.Payload)
	}
	return nil
}

// methodText says what a proof rests on.
func methodText(method string) string {
	switch method {
	case "pid_namespace":
		return "the kernel has taken down its PID namespace"
	case "cgroup":
		return "the kernel says that its control group is empty"
	case "reboot":
		return "the machine was started anew since"
	case "never_started":
		return "it was never started"
	}
	return "?"
}
