package pluginruntime

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
)

// TestFramesBehindTheRequest: what a peer sends in one go with its request for a
// WebSocket is not lost.
func TestFramesBehindTheRequest(t *testing.T) {
	t.Parallel()
	r := start(t, "", nil)
	raw, err := net.Dial("tcp", strings.TrimSuffix(strings.TrimPrefix(r.at.Control, "ws://"), "/control/ws"))
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	text := `{"seq_id":1,"action":"__ping","data":{}}`
	frame := string([]byte{0x81, 0x80 | byte(len(text)), 0, 0, 0, 0}) + text // RFC 6455, with a mask that changes nothing
	if _, err := io.WriteString(raw, "GET /control/ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"+frame+frame); err != nil {
		t.Fatal(err)
	}
	br := bufio.NewReader(raw)
	resp, err := http.ReadResponse(br, nil)
	if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("%v, %v", resp, err)
	}
	for range 2 {
		if _, err := br.ReadString('{'); err != nil {
			t.Fatal(err)
		}
		if got, err := br.ReadString('}'); err != nil || !strings.Contains(got, "pong") {
			t.Errorf("%q, %v", got, err)
		}
		if _, err := br.ReadString('}'); err != nil {
			t.Fatal(err)
		}
	}
}
