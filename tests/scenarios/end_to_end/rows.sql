-- Rows that are there before the first copy. FROM_ID is where keys begin.
INSERT INTO every_type
SELECT i, i % 2 = 0, i, -i, i * 10000000000, i / 3.0, -i / 7.0, (i || '.' || repeat('1', i % 40))::numeric,
  i / 3.0, 'text ' || i || E'\t\n\\N "q" ''', 'var' || i, 'c' || i, 'name' || i, 'x', decode(md5(i::text), 'hex'),
  date '2024-01-01' + (i % 500), time '00:00' + i * interval '1 s', '12:00:00+05:30'::timetz,
  timestamp '2024-01-01' + i * interval '1 hour', timestamptz '2024-06-01 00:00+00' + i * interval '1 day',
  make_interval(months => i % 100, days => i % 30, secs => i + 0.123456), md5(i::text)::uuid,
  ('{"b": ' || i || ', "a":  [1, 2]}')::json, jsonb_build_object('k', i, 'l', array[i, i]),
  '10.0.0.1/8'::inet + i % 1000, '10.0.0.0/8', '08:00:2b:01:02:03', '08:00:2b:01:02:03:04:05',
  point(i, -i), box(point(0, 0), point(i, i)), '[(0,0),(1,1),(2,0)]', '((0,0),(1,1),(2,0))',
  circle(point(0, 0), i), (i % 256)::bit(8), ('1' || repeat('0', i % 20))::varbit,
  to_tsvector('simple', 'word' || i || ' other'), 'a & b'::tsquery, int4range(i, i + 5),
  tstzrange('2024-01-01 00:00+00', NULL), nummultirange(numrange(i, i + 1), numrange(i + 2, NULL)),
  array[i, NULL, -i], array['a,b', NULL, '', 'NULL', '"'], array[1.50, i], '[5:6]={2024-01-01,infinity}',
  (i * 1.5)::numeric::money, '0/1'::pg_lsn + i, 4000000000 + i, '$.a[*] ? (@ > 1)',
  (array['sad', 'ok', 'happy'])[1 + i % 3]::mood, i + 1, 'label ' || i
FROM generate_series(FROM_ID, FROM_ID + 199) AS i;
INSERT INTO every_type (id) SELECT FROM_ID + 1000 + i FROM generate_series(1, 20) AS i;
INSERT INTO every_type (id, a_float4, a_float8, a_numeric, a_date, a_timestamp, a_timestamptz, ints,
  texts, a_text, a_bytea, an_int4range, a_nummultirange, a_char)
VALUES
  (FROM_ID + 2000, 'NaN', 'NaN', 'NaN', 'infinity', '-infinity', 'infinity', '{}', '{}', '', '', 'empty', '{}', ''),
  (FROM_ID + 2001, 'Infinity', '-Infinity', 'Infinity', '0044-03-15 BC', '4713-01-01 BC', '294276-12-31 23:59:59.999999+00', '[-2:0]={1,2,3}', '{{a,b},{c,d}}', U&'\00e9\4e2d\+01F600', '\x00ff00', '(,)', '{(,)}', 'é'),
  (FROM_ID + 2002, -0.0, -0.0, -0.00000000000000000000001, '5874897-12-31', '1999-12-31 23:59:59.999999', '1900-01-01 00:00:00+00', '{{1,NULL},{NULL,4}}', NULL, repeat('é', 3000), decode(repeat('00ff', 5000), 'hex'), '[1,1]', '{[1,2),[3,4)}', '  x'),
  (FROM_ID + 2003, 1e-37, 1.7976931348623157e308, repeat('9', 500)::numeric, '0001-01-01', '2000-02-29', '2024-03-31 02:30+01', NULL, NULL, NULL, NULL, NULL, NULL, NULL);

INSERT INTO customers (name, email) SELECT 'c' || i, CASE WHEN i % 5 > 0 THEN i + FROM_ID || '@x.org' END
FROM generate_series(1, 100) AS i;
INSERT INTO orders SELECT FROM_ID + i, (SELECT max(id) FROM customers WHERE id < 100000) - i % 50, now(), i * 1.01
FROM generate_series(1, 500) AS i;
INSERT INTO order_lines SELECT FROM_ID + i, l, 'item' || l, l FROM generate_series(1, 500) AS i, generate_series(1, 3) AS l;
INSERT INTO documents SELECT FROM_ID + i, 'title ' || i,
  (SELECT string_agg(md5(i || '/' || n), '') FROM generate_series(1, 400) AS n),
  (SELECT string_agg(decode(md5(i || ':' || n), 'hex'), '') FROM generate_series(1, 400) AS n)
FROM generate_series(1, 60) AS i;
INSERT INTO areas (id, width, height) SELECT FROM_ID + i, i, i + 1 FROM generate_series(1, 50) AS i;
INSERT INTO tickets (subject) SELECT 'ticket ' || i FROM generate_series(1, 50) AS i;
INSERT INTO tickets (id, subject) OVERRIDING SYSTEM VALUE VALUES (-FROM_ID - 1, 'by hand');
INSERT INTO events SELECT now(), 'event ' || i FROM generate_series(1, 50) AS i;
INSERT INTO wide_keys SELECT 'k' || i, md5(i::text)::uuid, FROM_ID + i, date '2024-01-01' + i, 'n'
FROM generate_series(1, 80) AS i;
INSERT INTO one_column SELECT FROM_ID + i FROM generate_series(1, 50) AS i;
INSERT INTO swaps SELECT FROM_ID + i, FROM_ID + i FROM generate_series(1, 20) AS i;
INSERT INTO measured (value) SELECT i / 3.0 FROM generate_series(1, 50) AS i;
INSERT INTO "Odd.Schema"."Odd ""Name""" SELECT FROM_ID + i, 'v"' || i, i, 'ü', 'dot', 'blank' FROM generate_series(1, 30) AS i;
INSERT INTO "Odd.Schema"."select" SELECT FROM_ID + i, 'w' FROM generate_series(1, 30) AS i;
INSERT INTO "Odd.Schema"."таблица.с.точками" SELECT FROM_ID + i, 'имя ' || i FROM generate_series(1, 30) AS i;
INSERT INTO "Odd.Schema"."$1; DROP TABLE x --" SELECT FROM_ID + i, '''', '\' FROM generate_series(1, 30) AS i;
