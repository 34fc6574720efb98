package pluginwire

import (
	"strings"
	"testing"
)

func sample(n int) []byte {
	return AppendRequest(nil, &OutRequest{Seq: 12345, Action: ActionEmitEvent, Data: []byte(`{"event_context":{"query_id":1,"event":{"text":"` + strings.Repeat("hello ", n/6) + `"}}}`),
		Context: Context{InstanceUUID: "7f0c6a3e-6f0e-4a55-9d0b-0a0d0c0b0a09", WorkspaceUUID: "7f0c6a3e-6f0e-4a55-9d0b-0a0d0c0b0a08", PlacementGeneration: 3,
			InstallationUUID: "7f0c6a3e-6f0e-4a55-9d0b-0a0d0c0b0a07", RuntimeRevision: 9, ArtifactDigest: strings.Repeat("0f", 32)}})
}

func BenchmarkDecode(b *testing.B) {
	for name, n := range map[string]int{"500B": 500, "64KiB": 64 << 10} {
		msg := sample(n)
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(msg)))
			b.ReportAllocs()
			var m Message
			for b.Loop() {
				if m.Decode(msg) != nil {
					b.Fatal("refused")
				}
			}
		})
	}
}

func BenchmarkContext(b *testing.B) {
	var m Message
	_ = m.Decode(sample(10))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := DecodeContext(m.Request.Context); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkForHost(b *testing.B) {
	data := []byte(`{"run_id":"x","llm_model_uuid":"y","messages":[` + strings.Repeat(`{"role":"user","content":"hello there"},`, 50) + `{}],"timeout":30}`)
	b.SetBytes(int64(len(data)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := ForHost(data, "author/name"); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkChunk(b *testing.B) {
	msg := sample(1 << 20)
	var lines []byte
	b.SetBytes(int64(len(msg)))
	b.ReportAllocs()
	for b.Loop() {
		lines, _ = appendFrames(lines[:0], msg)
	}
}
