package wire

import (
	"encoding/binary"
	"hash/crc32"

	"github.com/stockade-run/stockade/internal/api"
	"github.com/stockade-run/stockade/internal/errdefs"
)

// Kind says what a frame of a log carries.
type Kind uint8

// The kinds. Only output is kept on disk; KindGap and KindStatus exist on the
// wire alone.
const (
	KindStdout Kind = 1
	KindStderr Kind = 2
	KindGap    Kind = 254 // payload: JSON GapFrame; stands before the frames after the gap
	KindStatus Kind = 255 // payload: JSON StatusFrame; the last frame of an answer
)

// MaxPayload is the most bytes one frame carries.
const MaxPayload = 1 << 20

// HeaderSize is the size of a frame's header: little-endian magic (2 bytes),
// kind, zero, payload length (4), cursor (8), stream offset (8), CRC-32C of the
// payload (4), CRC-32C of the 28 bytes before (4).
const HeaderSize = 32

const magic = 0x4B53

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Header describes one frame. The same form is the record on disk.
type Header struct {
	Kind   Kind
	Length int   // payload bytes, 0 to MaxPayload
	Cursor int64 // position of the first byte in the order of all output
	Offset int64 // position of the first byte in its own stream
	Sum    uint32
}

// Sum returns the checksum of a payload.
func Sum(payload []byte) uint32 { return crc32.Checksum(payload, castagnoli) }

// AddSum returns the checksum of a payload whose first part has the checksum sum
// (0 for nothing) and goes on with more.
func AddSum(sum uint32, more []byte) uint32 { return crc32.Update(sum, castagnoli, more) }

// AppendHeader appends the encoded header to b.
func AppendHeader(b []byte, h Header) []byte {
	start := len(b)
	b = binary.LittleEndian.AppendUint16(b, magic)
	b = append(b, byte(h.Kind), 0)
	b = binary.LittleEndian.AppendUint32(b, uint32(h.Length))
	b = binary.LittleEndian.AppendUint64(b, uint64(h.Cursor))
	b = binary.LittleEndian.AppendUint64(b, uint64(h.Offset))
	b = binary.LittleEndian.AppendUint32(b, h.Sum)
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b[start:start+28], castagnoli))
}

// ParseHeader decodes the header at the start of b, which must hold HeaderSize
// bytes. It refuses, as errdefs.Invalid, a wrong magic or checksum, an unknown
// kind, a length over MaxPayload and positions outside 0 to api.MaxOffset, so a
// caller may trust what it gets.
func ParseHeader(b []byte) (Header, error) {
	if len(b) < HeaderSize {
		return Header{}, errdefs.New(errdefs.Invalid, "a frame header has %d bytes, it needs %d", len(b), HeaderSize)
	}
	if binary.LittleEndian.Uint16(b) != magic || b[3] != 0 {
		return Header{}, errdefs.New(errdefs.Invalid, "not a frame: wrong magic")
	}
	if crc32.Checksum(b[:28], castagnoli) != binary.LittleEndian.Uint32(b[28:]) {
		return Header{}, errdefs.New(errdefs.Invalid, "a frame header is damaged: wrong checksum")
	}
	h := Header{Kind: Kind(b[2]), Sum: binary.LittleEndian.Uint32(b[24:])}
	length := binary.LittleEndian.Uint32(b[4:])
	cursor, offset := binary.LittleEndian.Uint64(b[8:]), binary.LittleEndian.Uint64(b[16:])
	switch h.Kind {
	case KindStdout, KindStderr, KindGap, KindStatus:
	default:
		return Header{}, errdefs.New(errdefs.Invalid, "a frame has the unknown kind %d", b[2])
	}
	if length > MaxPayload {
		return Header{}, errdefs.New(errdefs.Invalid, "a frame claims %d bytes, the limit is %d", length, MaxPayload)
	}
	if cursor > uint64(api.MaxOffset) || offset > uint64(api.MaxOffset) {
		return Header{}, errdefs.New(errdefs.Invalid, "a frame's position is beyond 2^53")
	}
	h.Length, h.Cursor, h.Offset = int(length), int64(cursor), int64(offset)
	return h, nil
}

// GapFrame is the payload of KindGap: output from cursor From up to, not
// including, To is no longer kept.
type GapFrame struct {
	From int64 `json:"from"`
	To   int64 `json:"to"`
}

// StatusFrame is the payload of KindStatus.
type StatusFrame struct {
	Next   int64        `json:"next"`   // read on from here
	Oldest int64        `json:"oldest"` // first kept position
	EOF    bool         `json:"eof"`    // Next is the end and nothing will be added
	Phase  Phase        `json:"phase,omitempty"`
	Exit   *api.Exit    `json:"exit,omitempty"`
	Error  *api.Problem `json:"error,omitempty"` // why the answer ends early, such as a damaged segment
}
