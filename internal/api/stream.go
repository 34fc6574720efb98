package api

import (
	"encoding/binary"
	"strings"

	"github.com/stockade-run/stockade/internal/errdefs"
)

// StreamStatus is the payload of the status frame that ends a log in frames, in
// the public API. Error says why the stream ended early; the other fields may
// then be empty, and a reader goes on at the end of the last frame it got.
type StreamStatus struct {
	Next   string       `json:"next" doc:"The cursor to read on from."`
	Oldest string       `json:"oldest" doc:"The first cursor still kept."`
	EOF    bool         `json:"eof" doc:"next is the end and nothing will be added."`
	State  ProcessState `json:"state"`
	Exit   *Exit        `json:"exit,omitempty"`
	Error  *Problem     `json:"error,omitempty"`
}

// AttachProtocol is the WebSocket sub-protocol of attach.
const AttachProtocol = "stockade.attach.v1"

// AttachKind is the first byte of a binary message from an attached client.
type AttachKind byte

// The kinds of messages, each with what follows the byte. Numbers are
// little-endian, as in frames.
const (
	AttachStdin  AttachKind = 1 // offset (8 bytes), then the input
	AttachEOF    AttachKind = 2 // offset (8): the input ends there
	AttachResize AttachKind = 3 // rows (2), columns (2)
	AttachAck    AttachKind = 4 // position (8): every output byte before it was received
	AttachSignal AttachKind = 5 // a signal's name, such as SIGINT
)

// MaxAttachMessage bounds a message of a client: a stdin message with 1 MiB.
const MaxAttachMessage = 9 + 1<<20

// maxSignalName is longer than every name in SignalRequest.
const maxSignalName = 16

// AttachMessage is a decoded message of a client. Only the fields of its kind
// are set; Data shares memory with what was decoded.
type AttachMessage struct {
	Kind     AttachKind
	Position int64 // stdin, eof, ack
	Data     []byte
	Size     Winsize
	Signal   string
}

// AppendAttach appends the encoded message to b.
func AppendAttach(b []byte, m AttachMessage) []byte {
	b = append(b, byte(m.Kind))
	switch m.Kind {
	case AttachStdin:
		return append(binary.LittleEndian.AppendUint64(b, uint64(m.Position)), m.Data...)
	case AttachEOF, AttachAck:
		return binary.LittleEndian.AppendUint64(b, uint64(m.Position))
	case AttachResize:
		return binary.LittleEndian.AppendUint16(binary.LittleEndian.AppendUint16(b, m.Size.Rows), m.Size.Cols)
	default:
		return append(b, m.Signal...)
	}
}

// ParseAttach decodes a message of a client. It refuses, as invalid, unknown
// kinds, wrong lengths and numbers out of range.
func ParseAttach(b []byte) (AttachMessage, error) {
	if len(b) == 0 {
		return AttachMessage{}, errdefs.New(errdefs.Invalid, "a message is empty")
	}
	if len(b) > MaxAttachMessage {
		return AttachMessage{}, errdefs.New(errdefs.Invalid, "a message has %d bytes, the limit is %d", len(b), MaxAttachMessage)
	}
	m := AttachMessage{Kind: AttachKind(b[0])}
	rest := b[1:]
	want := func(n int) error {
		if len(rest) != n {
			return errdefs.New(errdefs.Invalid, "a message of kind %d has %d bytes after the kind, it needs %d", m.Kind, len(rest), n)
		}
		return nil
	}
	switch m.Kind {
	case AttachStdin:
		if len(rest) <= 8 {
			return AttachMessage{}, errdefs.New(errdefs.Invalid, "a stdin message carries no input")
		}
		m.Data = rest[8:]
	case AttachEOF, AttachAck:
		if err := want(8); err != nil {
			return AttachMessage{}, err
		}
	case AttachResize:
		if err := want(4); err != nil {
			return AttachMessage{}, err
		}
		m.Size = Winsize{Rows: binary.LittleEndian.Uint16(rest), Cols: binary.LittleEndian.Uint16(rest[2:])}
		if m.Size.Rows == 0 || m.Size.Cols == 0 || m.Size.Rows > 4096 || m.Size.Cols > 4096 {
			return AttachMessage{}, errdefs.New(errdefs.Invalid, "a terminal of %d rows and %d columns is not possible, 1 to 4096 are", m.Size.Rows, m.Size.Cols)
		}
		return m, nil
	case AttachSignal:
		m.Signal = string(rest)
		if len(rest) > maxSignalName || !strings.HasPrefix(m.Signal, "SIG") {
			return AttachMessage{}, errdefs.New(errdefs.Invalid, "a signal message does not name a signal")
		}
		return m, nil
	default:
		return AttachMessage{}, errdefs.New(errdefs.Invalid, "a message has the unknown kind %d", b[0])
	}
	n := binary.LittleEndian.Uint64(rest)
	if n > uint64(MaxOffset) {
		return AttachMessage{}, errdefs.New(errdefs.Invalid, "a position is beyond 2^53")
	}
	m.Position = int64(n)
	return m, nil
}

// AttachReply is a text message of the server, in JSON.
type AttachReply struct {
	// Type is "stdin" (how far the input was accepted) or "error".
	Type  string      `json:"type"`
	Stdin *StdinState `json:"stdin,omitempty"`
	// For says what failed: stdin, eof, resize, ack, signal or output.
	For     string   `json:"for,omitempty"`
	Problem *Problem `json:"problem,omitempty"`
}
