package jsonscan

// Object walks over the members of one JSON object.
type Object struct {
	Scanner
	started bool
	err     error
}

// Open begins the walk over b, which must hold an object and nothing else; outer and
// python are as in [Scanner].
func Open(b []byte, outer int, python bool) Object {
	o := Object{Scanner: Scanner{B: b, Outer: outer, Python: python}}
	o.Space()
	if o.I >= len(b) || b[o.I] != '{' {
		if o.I >= len(b) || !o.Value() || !o.End() {
			o.err = o.Scanner.Err()
		} else {
			o.err = ErrNotObject
		}
		return o
	}
	if outer >= MaxDepth {
		o.err = ErrTooDeep
	}
	o.Outer++
	o.I++
	return o
}

// Err is why the walk ended: nil at the object's end, else ErrNotObject, ErrTooDeep or
// ErrSyntax.
func (o *Object) Err() error { return o.err }

// Next returns the next member, or false at the end and at an error, which Err holds.
// name, still quoted, and value are parts of the bytes; at is where the name begins.
func (o *Object) Next() (name, value []byte, at int, ok bool) {
	if o.err != nil {
		return nil, nil, 0, false
	}
	o.Space()
	if o.I >= len(o.B) {
		return nil, nil, 0, o.fail()
	}
	switch c := o.B[o.I]; {
	case c == '}':
		o.I++
		if !o.End() {
			o.err = ErrSyntax
		}
		return nil, nil, 0, false
	case !o.started:
		o.started = true
	case c == ',':
		o.I++
		o.Space()
	default:
		return nil, nil, 0, o.fail()
	}
	at = o.I
	if !o.Text() {
		return nil, nil, 0, o.fail()
	}
	name = o.B[at:o.I]
	o.Space()
	if o.I >= len(o.B) || o.B[o.I] != ':' {
		return nil, nil, 0, o.fail()
	}
	o.I++
	o.Space()
	from := o.I
	if !o.Value() {
		return nil, nil, 0, o.fail()
	}
	return name, o.B[from:o.I], at, true
}

func (o *Object) fail() bool {
	o.err = o.Scanner.Err()
	return false
}
